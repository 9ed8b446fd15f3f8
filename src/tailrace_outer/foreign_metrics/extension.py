"""The entry point of the names of other servers for metrics."""

from __future__ import annotations

from tailrace.extensions import Extension

__all__ = ["EXTENSION"]

EXTENSION = Extension("foreign_metrics", "tailrace_outer.foreign_metrics.opening:open_foreign_metrics")
