"""Tools for tests: the laws of engines and log stores, an engine whose tokens are known in advance, and a proxy that
imitates a bad network."""

from __future__ import annotations

from tailrace_outer.scripted.scripted_engine import CONTROL_TOKENS, ScriptedEngine, scripted_token
from tailrace_outer.testing.chaos import Chaos, Flow, Line
from tailrace_outer.testing.conformance import Law, check_engine, laws
from tailrace_outer.testing.log_stores import StoreLaw, check_log_store, store_laws

__all__ = [
    "CONTROL_TOKENS",
    "Chaos",
    "Flow",
    "Law",
    "Line",
    "ScriptedEngine",
    "StoreLaw",
    "check_engine",
    "check_log_store",
    "laws",
    "scripted_token",
    "store_laws",
]
