"""Who wants to know of streams is told in order, with the prompts, and alone bears what it does wrong."""

from __future__ import annotations

import pytest
from tests.generation.world import World, greedy

from tailrace.errors import EngineLost
from tailrace.generation import Times
from tailrace.streams import Record
from tailrace.types import End


class _Notes:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.ends: list[End] = []

    def on_admitted(self, record: Record, times: Times) -> None:
        assert times.admitted_s is not None
        assert times.first_s is None
        self.calls.append(("admitted", record.prompts[0].text))

    def on_first_token(self, record: Record, times: Times) -> None:
        assert times.first_s is not None
        self.calls.append(("first token", record.prompts[0].text))

    def on_end(self, record: Record, end: End, times: Times) -> None:
        assert times.ended_s is not None
        self.calls.append(("end", record.prompts[0].text))
        self.ends.append(end)


class _Broken:
    def on_admitted(self, record: Record, times: Times) -> None:
        raise RuntimeError("admitted")

    def on_first_token(self, record: Record, times: Times) -> None:
        raise RuntimeError("first token")

    def on_end(self, record: Record, end: End, times: Times) -> None:
        raise RuntimeError("end")


async def test_an_observer_sees_each_station_once() -> None:
    world = World()
    notes = _Notes()
    world.generator.observers.add(notes)
    run = await world.create("Hi", greedy(5, n=2))
    world.finish(run)
    assert notes.calls == [("admitted", "Hi"), ("first token", "Hi"), ("end", "Hi")]
    assert notes.ends == [run.log.end]


async def test_a_stream_that_is_cancelled_in_the_queue_has_an_end_only() -> None:
    world = World(max_sequences=1)
    notes = _Notes()
    first = await world.create("Hi", greedy(5))
    world.generator.observers.add(notes)
    second = await world.create("Ho", greedy(5))
    second.cancel()
    assert notes.calls == [("end", "Ho")]
    assert notes.ends[0].status == "cancelled"
    world.finish(first)


async def test_a_replay_is_no_second_first_token() -> None:
    world = World()
    notes = _Notes()
    world.generator.observers.add(notes)
    run = await world.create("Hi", greedy(9))
    world.engine.step(3)
    world.engine.lose(EngineLost("gone"))
    world.engine.come_back()
    world.finish(run)
    assert notes.calls == [("admitted", "Hi"), ("first token", "Hi"), ("end", "Hi")]
    assert notes.ends[0].continuity == "replayed"


async def test_an_observer_that_raises_is_logged_and_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    notes = _Notes()
    world.generator.observers.add(_Broken())
    world.generator.observers.add(notes)
    run = await world.create("Hi", greedy(5))
    world.finish(run)
    assert [name for name, _ in notes.calls] == ["admitted", "first token", "end"]
    assert run.log.end is not None
    assert run.log.end.status == "done"
    assert caplog.text.count("an observer of streams has failed") == 3
    world.check_idle()
