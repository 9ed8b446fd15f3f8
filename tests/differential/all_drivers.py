"""Imports all modules that register drivers."""

from __future__ import annotations

from tests.differential import language_clients, other_processes, readers
from tests.differential.drivers import DRIVERS

__all__ = ["DRIVERS", "language_clients", "other_processes", "readers"]
