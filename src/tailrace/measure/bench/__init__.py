"""Measures what the server adds to the engine, and what it carries by itself.

The room's law: what is compared runs in one run on one machine, in turns, and what is quoted is a ratio of medians.
Nothing here is imported by a server.
"""

from __future__ import annotations

from tailrace.measure.bench.compare import Pair, compare_engine, compare_server, engine_alone
from tailrace.measure.bench.load import Round
from tailrace.measure.bench.machine import Machine, look_at_machine

__all__ = ["Machine", "Pair", "Round", "compare_engine", "compare_server", "engine_alone", "look_at_machine"]
