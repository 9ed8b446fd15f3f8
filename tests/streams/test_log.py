from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.examples import examples
from tests.streams.virtual_time import run
from tests.waiting import idle, turn, wait_until

from tailrace.errors import LeaseLost
from tailrace.streams import Producer, Reader, StreamLog
from tailrace.types import (
    End,
    Event,
    Failure,
    PromptProgress,
    Record,
    Released,
    Status,
    TextDelta,
    Usage,
    is_stream_id,
    new_stream_id,
)

END = End("done", Usage(1, 1))


def delta(text: str = "a", choice: int = 0) -> TextDelta:
    return TextDelta(text, (1,), choice)


class Heard(Producer):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def cancel(self) -> None:
        self.heard.append("cancel")

    def unread(self) -> None:
        self.heard.append("unread")

    def read(self) -> None:
        self.heard.append("read")

    def ended(self) -> None:
        self.heard.append("ended")

    def lease_lost(self) -> None:
        self.heard.append("lease_lost")

    @property
    def status(self) -> str:
        return "running"


def new_log() -> StreamLog:
    return StreamLog(Record("abc", 1.0))


class LogMachine(RuleBasedStateMachine):
    """A log whose readers come, wait, take, are interrupted and leave, compared with a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.log = new_log()
        self.producer = self.log.producer = Heard()
        self.expected: list[Event] = []
        self.readers: list[tuple[Reader, list[Event], int]] = []  # what it has had, from behind where
        self.waits: dict[int, asyncio.Task[None]] = {}  # by id of the reader

    def teardown(self) -> None:
        for task in self.waits.values():
            task.cancel()
        self.turn()
        assert self.log.num_waiting == 0
        self.loop.close()

    def turn(self) -> None:
        """Let every task run until it waits."""
        self.loop.run_until_complete(idle())

    @property
    def has_ended(self) -> bool:
        return any(isinstance(event, End) for event in self.expected)

    @rule(text=st.text(max_size=3), choice=st.integers(0, 1))
    def append_delta(self, text: str, choice: int) -> None:
        event = delta(text, choice)
        self.log.extend([event])
        if not self.has_ended:
            self.expected.append(event)

    @rule(status=st.sampled_from(["done", "error", "cancelled", "interrupted"]))
    def append_end(self, status: Status) -> None:
        event = End(status, Usage(1, len(self.expected)))
        self.log.extend([event])
        if not self.has_ended:
            self.expected.append(event)

    @rule(share=st.floats(0, 1), at_end_only=st.booleans())
    def come(self, share: float, at_end_only: bool) -> None:
        after = round(share * len(self.expected))
        reader = Reader(self.log, after, at_end_only=at_end_only)
        before = list(self.producer.heard)
        reader.__enter__()
        assert self.producer.heard[len(before) :] == ([] if self.readers else ["read"])
        self.readers.append((reader, [], after))

    @precondition(lambda self: self.readers)
    @rule(pick=st.integers(0, 99))
    def take(self, pick: int) -> None:
        reader, had, after = self.readers[pick % len(self.readers)]
        num_deltas = len(self.expected) - self.has_ended
        if not reader.at_end_only:
            deltas = reader.take() if reader.cursor < num_deltas else []
            assert isinstance(deltas, list)
            had.extend(deltas)
            assert had == self.expected[after:num_deltas]
        assert reader.take() == (self.expected[-1] if self.has_ended else [])
        assert reader.cursor == (after if reader.at_end_only and not self.has_ended else len(self.expected))

    @precondition(lambda self: self.readers)
    @rule(pick=st.integers(0, 99))
    def wait(self, pick: int) -> None:
        reader, _, _ = self.readers[pick % len(self.readers)]
        task = self.waits.get(id(reader))
        if task is None or task.done():
            self.waits[id(reader)] = self.loop.create_task(reader.wait())
            self.turn()

    @precondition(lambda self: self.waits)
    @rule(pick=st.integers(0, 99))
    def interrupt(self, pick: int) -> None:
        task = list(self.waits.values())[pick % len(self.waits)]
        task.cancel()
        self.turn()

    @precondition(lambda self: self.waits)
    @rule(pick=st.integers(0, 99))
    def wake(self, pick: int) -> None:
        chosen = list(self.waits)[pick % len(self.waits)]
        reader = next(reader for reader, _, _ in self.readers if id(reader) == chosen)
        reader.wake()
        self.turn()
        assert self.waits[chosen].done()

    @precondition(lambda self: self.readers)
    @rule(pick=st.integers(0, 99))
    def leave(self, pick: int) -> None:
        reader, _, _ = self.readers.pop(pick % len(self.readers))
        task = self.waits.pop(id(reader), None)
        if task is not None:
            task.cancel()
            self.turn()
        before = list(self.producer.heard)
        reader.__exit__(None, None, None)
        assert self.producer.heard[len(before) :] == ([] if self.readers else ["unread"])

    @invariant()
    def the_log_is_the_list(self) -> None:
        assert self.log.events == self.expected
        assert self.log.last_seq == len(self.expected)
        assert self.log.num_readers == len(self.readers)
        assert (self.log.end is not None) == self.has_ended
        assert sum(isinstance(event, End) for event in self.log.events) <= 1
        for choice in (0, 1):
            texts = [e.text for e in self.expected if isinstance(e, TextDelta) and e.choice == choice]
            assert self.log.text(choice) == "".join(texts)

    @invariant()
    def who_waits_has_reason_to(self) -> None:
        self.turn()
        pending = 0
        for reader, _, _ in self.readers:
            task = self.waits.get(id(reader))
            if task is not None and not task.done():
                pending += 1
                assert not self.has_ended
                assert reader.at_end_only or reader.cursor == len(self.expected)
        assert self.log.num_waiting == pending


LogMachine.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=30, deadline=None)
TestLogAgainstAList = LogMachine.TestCase


def test_nothing_is_added_after_the_terminal_event() -> None:
    log = new_log()
    log.extend([delta()])
    log.extend([END])
    log.extend([delta("b")])
    log.extend([End("error", Usage(1, 1))])
    assert log.events == [delta(), END]
    assert log.end is END


def test_bytes_grow_with_text_and_with_events() -> None:
    log = new_log()
    log.extend([delta("")])
    one = log.num_bytes
    log.extend([delta("x" * 1000)])
    assert log.num_bytes == 2 * one + 1000


def test_taken_events_do_not_change() -> None:
    log = new_log()
    log.extend([delta()])
    reader = Reader(log)
    taken = reader.take()
    log.extend([delta("b")])
    assert taken == [delta()]
    assert reader.take() == [delta("b")]


def test_a_reader_that_never_reads_is_not_known_to_the_log() -> None:
    log = new_log()
    with Reader(log) as reader:
        for _ in range(100):
            log.extend([delta()])
        assert log.num_waiting == 0
        assert reader.cursor == 0
        assert reader.take() == [delta()] * 100


def test_a_reader_for_the_end_is_woken_once() -> None:
    async def scenario() -> None:
        log = new_log()
        wakes = 0

        async def read() -> None:
            nonlocal wakes
            with Reader(log, at_end_only=True) as reader:
                while log.end is None:
                    await reader.wait()
                    wakes += 1

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            for _ in range(100):
                await idle()
                log.extend([delta()])
            assert log.num_waiting == 1
            log.extend([END])
        assert wakes == 1

    run(scenario())


def test_progress_wakes_only_the_readers_that_show_it() -> None:
    async def scenario() -> None:
        log, first, second = new_log(), PromptProgress(9, 3, 0, 0.5), PromptProgress(9, 6, 0, 1.0)
        showing, other = Reader(log, shows_progress=True), Reader(log)
        waiting = [asyncio.create_task(reader.wait()) for reader in (showing, other)]
        await idle()
        log.report(first)
        await idle()
        assert [task.done() for task in waiting] == [True, False]
        assert (showing.take_progress(), other.take_progress()) == (first, None)
        assert showing.take_progress() is None  # it has this one
        log.report(second)
        await Reader(log, shows_progress=True).wait()  # which comes later, and gets the newest at once
        assert showing.take_progress() == second
        log.extend([delta()])
        await waiting[1]
        log.report(first)
        assert log.progress == second  # there is none after the first event
        assert Reader(log, shows_progress=True).take_progress() is None
        assert (log.last_seq, log.num_waiting) == (1, 0)

    run(scenario())


def test_a_reader_for_the_end_waits_despite_new_events() -> None:
    async def scenario() -> None:
        log = new_log()
        log.extend([delta()])
        task = asyncio.create_task(Reader(log, at_end_only=True).wait())
        await idle()
        log.extend([delta()])
        await idle()
        assert not task.done()
        log.extend([END])
        await task

    run(scenario())


def test_waiting_returns_at_once_when_there_is_something_to_take() -> None:
    async def scenario() -> None:
        log = new_log()
        log.extend([delta()])
        await Reader(log, 0).wait()
        log.extend([END])
        await Reader(log, 2).wait()
        await Reader(log, 0, at_end_only=True).wait()
        assert log.num_waiting == 0

    run(scenario())


def test_events_of_one_turn_wake_a_reader_once_for_all() -> None:
    async def scenario() -> None:
        log = new_log()
        batches = []

        async def read() -> None:
            with Reader(log) as reader:
                while isinstance(taken := await reader.next(), list):
                    batches.append(len(taken))

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            await idle()
            for _ in range(5):
                log.extend([delta()])
            await idle()
            log.extend([END])
        assert batches == [5]

    run(scenario())


@pytest.mark.parametrize("at_end_only", [False, True])
def test_a_wait_that_is_cancelled_leaves_nothing_behind(at_end_only: bool) -> None:
    async def scenario() -> None:
        log = new_log()
        reader = Reader(log, at_end_only=at_end_only)
        task = asyncio.create_task(reader.wait())
        await idle()
        assert log.num_waiting == 1
        task.cancel()
        await asyncio.wait([task])
        assert log.num_waiting == 0
        log.extend([delta()])
        assert reader.take() == ([] if at_end_only else [delta()])

    run(scenario())


@pytest.mark.parametrize("at_end_only", [False, True])
def test_a_wait_that_is_cancelled_as_the_event_comes(at_end_only: bool) -> None:
    async def scenario() -> None:
        log = new_log()
        reader = Reader(log, at_end_only=at_end_only)
        task = asyncio.create_task(reader.wait())
        await idle()
        log.extend([END])
        task.cancel()
        await asyncio.wait([task])
        assert log.num_waiting == 0
        assert reader.take() == END

    run(scenario())


def test_wake_ends_a_wait_and_nothing_else() -> None:
    async def scenario() -> None:
        log = new_log()
        reader = Reader(log)
        reader.wake()  # nobody waits
        task = asyncio.create_task(reader.wait())
        await idle()
        assert not task.done()
        reader.wake()
        reader.wake()
        await task
        assert log.num_waiting == 0
        assert reader.take() == []

    run(scenario())


def test_the_end_comes_behind_all_events_and_can_be_taken_again() -> None:
    log = new_log()
    log.extend([delta("a"), delta("b"), END])
    reader = Reader(log, 1)
    assert [reader.take() for _ in range(3)] == [[delta("b")], END, END]
    assert (reader.cursor, Reader(log, 3).take()) == (3, END)


def test_a_released_stream_is_left_behind_its_last_event() -> None:
    log = new_log()
    log.extend([delta()])
    reader, reason = Reader(log), LeaseLost("Another server writes it.")
    log.release(reason)
    released = Released(log.stream_id, 1, Failure(reason.code, reason.message))
    assert [reader.take() for _ in range(3)] == [[delta()], released, released]
    log.extend([END])  # which came all the same
    assert reader.take() == END


def test_the_next_may_be_nothing_after_some_time() -> None:
    async def scenario() -> None:
        log = new_log()
        reader = Reader(log)
        assert await reader.next(0.001) == []
        task = asyncio.create_task(reader.next(1000.0))
        await idle()
        log.extend([delta(), END])
        assert (await task, await reader.next()) == ([delta()], END)
        assert log.num_waiting == 0

    run(scenario())


def test_a_reader_ahead_of_the_log_gets_nothing_from_before_its_place() -> None:
    async def scenario() -> None:
        log = new_log()
        reader = Reader(log, 2)
        for text in "ab":
            task = asyncio.create_task(reader.wait())
            await idle()
            log.extend([delta(text)])
            await task
            assert reader.take() == []
        log.extend([delta("c")])
        assert reader.take() == [delta("c")]

    run(scenario())


def test_an_id_is_no_option_of_a_command() -> None:
    """Of random text in this alphabet, one in 64 would begin with `-`."""
    ids = {new_stream_id() for _ in range(2000)}
    assert len(ids) == 2000
    assert all(is_stream_id(stream_id) and not stream_id.startswith("-") for stream_id in ids)


@pytest.mark.parametrize("is_read", [True, False])
async def test_a_reader_that_came_while_the_process_stood_still_is_heard(*, is_read: bool) -> None:
    """The timer is due before what has come in meanwhile is read."""
    log = StreamLog(Record("abc", 1.0, linger_s=0.01))
    producer = log.producer = Heard()
    log.linger()
    time.sleep(2.1)  # it stands still
    await turn(3)
    if is_read:
        with Reader(log):
            assert producer.heard == ["read"]
    else:
        await wait_until(lambda: producer.heard == ["cancel"])
