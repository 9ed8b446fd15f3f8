"""The entry point of the routes of operators, sessions, keys, owners and usage."""

from __future__ import annotations

from tailrace.extensions import Extension

__all__ = ["EXTENSION"]

EXTENSION = Extension("admin", "tailrace_outer.admin.opening:open_admin")
