"""Gaps of over a second: each is reported once, with its cause, and its seconds are added up."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.generation.harness import Harness, greedy

from tailrace.generation.stalls import StallCause, StallWatch
from tailrace.streams import Reader
from tailrace.streams.sqlite_store import open_sqlite


class _Report:
    def __init__(self) -> None:
        self.num_new: dict[StallCause, int] = {}
        self.seconds: dict[StallCause, float] = {}

    def on_stall(self, model: str, cause: StallCause, stalled_s: float, *, is_new: bool) -> None:
        self.num_new[cause] = self.num_new.get(cause, 0) + is_new
        self.seconds[cause] = self.seconds.get(cause, 0.0) + stalled_s


class _Looks:
    """Looks at times of the test's own."""

    def __init__(self, harness: Harness) -> None:
        self.report = _Report()
        self._now_s = time.monotonic()
        self._watch = StallWatch([harness.generator], self.report)

    def look(self, *, for_s: float, every_s: float = 0.25) -> None:
        for _ in range(round(for_s / every_s)):
            self._now_s += every_s
            self._watch.look(self._now_s)


async def test_a_gap_of_the_engine_is_one_stall() -> None:
    harness = Harness()
    await harness.create(sampling=greedy(50))
    looks = _Looks(harness)
    looks.look(for_s=3)
    assert looks.report.num_new == {}  # it has no token: it waits, or reads its prompt
    harness.engine.step(2)
    looks.look(for_s=3)
    assert looks.report.num_new == {"engine": 1}
    assert looks.report.seconds["engine"] == pytest.approx(2.75)
    harness.engine.step(1)
    looks.look(for_s=0.75)
    assert looks.report.num_new == {"engine": 1}


async def test_one_in_the_background_that_waits_again_does_not_stall() -> None:
    harness = Harness(max_sequences=1)
    await harness.create(sampling=greedy(50), is_background=True)
    harness.engine.step(2)
    await harness.create("live", greedy(50))
    looks = _Looks(harness)
    looks.look(for_s=3)
    assert looks.report.num_new == {}


async def test_tokens_that_wait_for_the_journal(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path) as store:
        await _check_the_journal(Harness(store=store))


async def _check_the_journal(harness: Harness) -> None:
    run = await harness.create(sampling=greedy(50))
    looks = _Looks(harness)
    harness.engine.deliver(harness.engine.compute())  # in this turn of the event loop, nothing is kept
    assert run.log.queued
    looks.look(for_s=2)
    assert looks.report.num_new["journal"] == 1


async def test_a_reader_that_takes_nothing() -> None:
    harness = Harness()
    run = await harness.create(sampling=greedy(50))
    looks = _Looks(harness)
    with Reader(run.log) as slow, Reader(run.log) as quick:
        for _ in range(12):
            harness.engine.step(1)
            quick.take()
            looks.look(for_s=0.25)
        assert looks.report.num_new == {"reader": 1}
        slow.take()
        quick.take()
        looks.look(for_s=0.75)
        assert looks.report.num_new == {"reader": 1}


async def test_a_server_that_did_nothing() -> None:
    harness = Harness()
    await harness.create(sampling=greedy(50))
    harness.engine.step(1)
    looks = _Looks(harness)
    looks.look(for_s=0.5)
    looks.look(for_s=3, every_s=3)
    assert looks.report.num_new == {"server": 1}
    assert looks.report.seconds["server"] == pytest.approx(2.75)
