"""Measures the server's overhead over the engine, and the capacity of the server alone.

Rule: both sides of a comparison alternate in one run on one machine, and the result is a ratio of medians.
A server imports nothing from here.
"""

from __future__ import annotations

from tailrace_outer.measure.bench.compare import Pair, compare_engine, compare_server, engine_alone
from tailrace_outer.measure.bench.load import Round
from tailrace_outer.measure.bench.machine import Machine, look_at_machine, measure_machine

__all__ = [
    "Machine",
    "Pair",
    "Round",
    "compare_engine",
    "compare_server",
    "engine_alone",
    "look_at_machine",
    "measure_machine",
]
