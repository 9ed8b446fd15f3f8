"""What tests need: the laws that every engine keeps, an engine whose tokens are known beforehand, and a bad network."""

from __future__ import annotations

from tailrace.engines.scripted import CONTROL_TOKENS, ScriptedEngine, scripted_token
from tailrace.testing.chaos import Chaos, Flow, Line
from tailrace.testing.conformance import Law, check_engine, laws

__all__ = [
    "CONTROL_TOKENS",
    "Chaos",
    "Flow",
    "Law",
    "Line",
    "ScriptedEngine",
    "check_engine",
    "laws",
    "scripted_token",
]
