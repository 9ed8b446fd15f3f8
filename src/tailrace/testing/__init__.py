"""What tests of engines need: the laws that every engine keeps, and an engine whose every token is known beforehand."""

from __future__ import annotations

from tailrace.engines.scripted import CONTROL_TOKENS, ScriptedEngine, scripted_token
from tailrace.testing.conformance import Law, check_engine, laws

__all__ = ["CONTROL_TOKENS", "Law", "ScriptedEngine", "check_engine", "laws", "scripted_token"]
