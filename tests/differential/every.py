"""All drivers, registered."""

from __future__ import annotations

from tests.differential import elsewhere, language_clients, readers
from tests.differential.drivers import DRIVERS

__all__ = ["DRIVERS", "elsewhere", "language_clients", "readers"]
