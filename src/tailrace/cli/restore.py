"""`tailrace restore`: see `backup`."""

from __future__ import annotations

from tailrace.cli.backup import restore

__all__ = ["restore"]
