"""The server process: edge, routes, response writer, lifecycle.

The room's law: the only one that knows HTTP. It never runs model code, it answers every request within a bound, and
what goes wrong after the headers becomes an event.
"""

from __future__ import annotations

from tailrace.server.settings import Settings, settings_table

__all__ = ["Settings", "settings_table"]
