"""The simulation of many servers answers as it must where the answer is known."""

from __future__ import annotations

import importlib

_sim = importlib.import_module("bench.scale_sim")
Site, simulate = _sim.Site, _sim.simulate


def test_one_server_waits_for_its_own_call_only() -> None:
    found = simulate(Site(servers=1, streams=1, nodes=1))
    assert found["commit_p50_ms"] == round(1000 * (_sim.ROUND_TRIP_S + _sim.CALL_S), 1)


def test_more_primaries_and_a_pause_shorten_the_queue() -> None:
    one = simulate(Site(100, 20_000, 1))["commit_p99_ms"]
    assert simulate(Site(100, 20_000, 16))["commit_p99_ms"] < one
    paused = simulate(Site(100, 100_000, 16, pause_s=0.02))
    assert paused["commit_p99_ms"] < simulate(Site(100, 100_000, 16))["commit_p99_ms"]
