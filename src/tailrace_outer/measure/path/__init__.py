"""Measures what lies between a client and a server: what proxies and balancers do to streams."""

from __future__ import annotations

from tailrace_outer.measure.path.probe import Found, PathFailed, measure_path
from tailrace_outer.measure.path.proxy_settings import PROXIES, settings_for

__all__ = ["PROXIES", "Found", "PathFailed", "measure_path", "settings_for"]
