"""Observers are called in order, with the prompts. A failing observer affects nothing else."""

from __future__ import annotations

import pytest
from tests.generation.harness import Harness, greedy

from tailrace.assembly.served import Served
from tailrace.errors import EngineLost, TailraceError, UnknownModel
from tailrace.generation import Observer, Times
from tailrace.generation.observers import Observers
from tailrace.settings import Settings
from tailrace.streams import StreamLog
from tailrace.types import Arrival, End, Record
from tailrace_outer.scripted.scripted_models import find_scripted


class _Notes(Observer):
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.ends: list[End] = []
        self.losses: list[int] = []

    def on_arrival(self, arrival: Arrival) -> None:
        self.calls.append(("arrived", arrival.model))

    def on_refused(self, arrival: Arrival, error: TailraceError) -> None:
        self.calls.append(("refused", error.code))

    def on_begun(self, record: Record) -> None:
        self.calls.append(("begun", record.prompts[0].text))

    def on_admitted(self, record: Record, times: Times) -> None:
        assert times.admitted_s is not None
        assert times.first_s is None
        self.calls.append(("admitted", record.prompts[0].text))

    def on_first_token(self, record: Record, times: Times) -> None:
        assert times.first_s is not None
        self.calls.append(("first token", record.prompts[0].text))

    def on_end(self, record: Record, log: StreamLog, times: Times) -> None:
        assert times.ended_s is not None
        assert log.end is not None
        self.calls.append(("end", record.prompts[0].text))
        self.ends.append(log.end)
        self.losses.append(times.num_losses)


class _Broken(Observer):
    def on_arrival(self, arrival: Arrival) -> None:
        raise RuntimeError("arrival")

    def on_refused(self, arrival: Arrival, error: TailraceError) -> None:
        raise RuntimeError("refused")

    def on_begun(self, record: Record) -> None:
        raise RuntimeError("begun")

    def on_admitted(self, record: Record, times: Times) -> None:
        raise RuntimeError("admitted")

    def on_first_token(self, record: Record, times: Times) -> None:
        raise RuntimeError("first token")

    def on_end(self, record: Record, log: StreamLog, times: Times) -> None:
        raise RuntimeError("end")


async def test_an_observer_is_called_once_for_each_stage() -> None:
    harness = Harness()
    notes = _Notes()
    harness.generator.observers.add(notes)
    run = await harness.create("Hi", greedy(5, n=2))
    harness.finish(run)
    assert notes.calls == [("begun", "Hi"), ("admitted", "Hi"), ("first token", "Hi"), ("end", "Hi")]
    assert notes.ends == [run.log.end]


async def test_a_stream_that_is_cancelled_in_the_queue_is_never_admitted() -> None:
    harness = Harness(max_sequences=1)
    notes = _Notes()
    first = await harness.create("Hi", greedy(5))
    harness.generator.observers.add(notes)
    second = await harness.create("Ho", greedy(5))
    second.cancel()
    assert notes.calls == [("begun", "Ho"), ("end", "Ho")]
    assert notes.ends[0].status == "cancelled"
    harness.finish(first)


async def test_a_replay_does_not_count_as_a_first_token() -> None:
    harness = Harness()
    notes = _Notes()
    harness.generator.observers.add(notes)
    run = await harness.create("Hi", greedy(9))
    harness.engine.step(3)
    harness.engine.fail(EngineLost("gone"))
    harness.engine.restart()
    harness.finish(run)
    assert notes.calls == [("begun", "Hi"), ("admitted", "Hi"), ("first token", "Hi"), ("end", "Hi")]
    assert notes.ends[0].continuity == "replayed"
    assert notes.losses == [1]


async def test_an_observer_that_raises_is_logged_and_does_not_disturb_others(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    notes = _Notes()
    harness.generator.observers.add(_Broken())
    harness.generator.observers.add(notes)
    run = await harness.create("Hi", greedy(5))
    harness.finish(run)
    assert [name for name, _ in notes.calls] == ["begun", "admitted", "first token", "end"]
    assert run.log.end is not None
    assert run.log.end.status == "done"
    assert caplog.text.count("an observer of streams has failed") == 4
    harness.check_idle()


async def test_a_request_without_a_stream_is_refused() -> None:
    harness = Harness()
    notes = _Notes()
    harness.generator.observers.add(notes)
    served = Served(find_scripted("scripted").card, harness.engine.spec, Settings())
    served.generator = harness.generator
    arrival = Arrival("scripted", "native", "alice", "abcdefghjkmn")
    with pytest.raises(UnknownModel), served.arriving(arrival):
        raise UnknownModel("There is no such model here.")
    assert served.num_arriving == 0
    assert notes.calls == [("arrived", "scripted"), ("refused", "model_not_found")]


def test_who_wants_to_hear_of_reads() -> None:
    class Reads(Observer):
        def on_read(self, record: Record, after: int, read_s: float, trace: str) -> None: ...

    observers = Observers()
    observers.add(Observer())
    assert not observers.hear_of_reads
    observers.add(Reads())
    assert observers.hear_of_reads
