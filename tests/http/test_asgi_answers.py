"""The writers of answers: the size of writes, skipped events, and readers that are sent away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from starlette.routing import Router
from starlette.types import Message, Scope
from tests.api.socket_client import models_of, server_of
from tests.dialects.sse import parse
from tests.dialects.transcripts import VIEWS, facts
from tests.generation.harness import Harness, greedy, text_of
from tests.streams.virtual_time import scenario
from tests.waiting import turn

from tailrace.api.routes import Routes
from tailrace.api.stream_starts import StreamStarts
from tailrace.dialects import Encoder, View, openai
from tailrace.errors import StorageError
from tailrace.http.asgi_answers import StreamAnswer, WholeAnswer
from tailrace.http.wires import ServedWires
from tailrace.streams import StreamLog
from tailrace.types import End, Event, Record, TextDelta, Usage
from tailrace_outer.responses.responses_events import ResponsesView

_WRITE_BYTES = 64 * 2**10
_WORD = " river"
_GET: Scope = {"type": "http", "method": "GET"}


def long_log(num_words: int, *, ended: bool = True) -> StreamLog:
    log = StreamLog(Record("s", 0.0))
    grow(log, num_words)
    if ended:
        log.extend([TextDelta("", (256,), finish_reason="stop")])
        log.extend([End("done", Usage(4, num_words + 1))])
    return log


def grow(log: StreamLog, num_words: int) -> None:
    for _ in range(num_words):
        log.extend([TextDelta(_WORD, (265,))])


async def written(log: StreamLog, view: View, on_write: Callable[[], Awaitable[None]] | None = None) -> list[bytes]:
    """Return the writes of a log. The socket accepts each at once, except while `on_write` waits."""
    writes: list[bytes] = []

    async def send(message: Message) -> None:
        if message.get("body"):
            writes.append(message["body"])
            if on_write is not None:
                await on_write()

    answer = StreamAnswer(log, view.open(facts()), view, after=0, headers={}, heartbeat_s=15.0)
    await answer(_GET, _never, send)
    return writes


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def texts(stream: bytes) -> list[str]:
    *before, done = [message.text for message in parse(stream)]
    assert done == "[DONE]"
    return [json.loads(text)["text"] for text in before]


@scenario
async def test_a_write_is_bounded_by_its_bytes() -> None:
    for name in ("native", "chat"):
        log = long_log(2_000)
        writes = await written(log, VIEWS[name])
        encoder = VIEWS[name].open(facts())
        assert b"".join(writes) == b"".join(encoder.encode(seq, event) for seq, event in enumerate(log.events, 1))
        assert max(map(len, writes)) < _WRITE_BYTES + 1_000


@scenario
async def test_a_reader_far_behind_continues_from_the_newest_text() -> None:
    num_words = 5_000
    for name in ("cumulative", "cumulative_followed"):
        writes = await written(long_log(num_words), VIEWS[name])
        seen = texts(b"".join(writes))
        assert seen[-1] == _WORD * num_words
        assert seen == sorted(set(seen), key=len)
        frame_bytes = num_words * len(_WORD) + 1_000
        assert max(map(len, writes)) < _WRITE_BYTES + frame_bytes
        assert sum(map(len, writes)) < 2 * (_WRITE_BYTES + frame_bytes)  # 75 MB, if each were shown


@scenario
async def test_a_reader_slightly_behind_sees_every_text() -> None:
    seen = texts(b"".join(await written(long_log(100), VIEWS["cumulative"])))
    assert seen == [_WORD * number for number in range(1, 101)]


@scenario
async def test_events_during_a_slow_write_become_one() -> None:
    log = long_log(12_000, ended=False)  # whose text is longer than a write
    num_writes = 0

    async def wait() -> None:
        nonlocal num_writes
        num_writes += 1
        if num_writes < 5:
            grow(log, 100)
        elif num_writes == 5:
            log.extend([End("done", Usage(4, 12_400))])

    _, *writes, end = await written(log, VIEWS["cumulative"], wait)
    shown = [json.loads(message.text)["text"] for write in writes for message in parse(write)]
    assert [len(text) // len(_WORD) for text in shown] == [12_100, 12_200, 12_300, 12_400]
    assert end == b"data: [DONE]\n\n"


@scenario
async def test_other_tasks_run_while_nothing_is_sent() -> None:
    log = long_log(5_000)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await turn()

    async with asyncio.TaskGroup() as group:
        counting = group.create_task(count())
        assert await written(log, ResponsesView(starting_after=10**6)) == []
        counting.cancel()
    assert turns >= log.last_seq // 512


@scenario
async def test_other_tasks_run_while_a_socket_accepts_everything() -> None:
    turns: list[int] = []

    async def note() -> None:
        turns.append(num_turns)

    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await turn()

    async with asyncio.TaskGroup() as group:
        counting = group.create_task(count())
        await written(long_log(5_000), VIEWS["native"], note)
        counting.cancel()
    *turns, last = turns
    assert turns == sorted(set(turns))
    assert last == turns[-1]  # the end alone comes without a break


def test_resuming_encodes_only_written_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier events are not encoded: on this wire, their texts together have a size of the square of the stream's
    length."""
    rendered: list[bytes] = []
    encoders = type(VIEWS["cumulative"].open(facts()))
    encode = encoders.encode

    def counting(self: Encoder, seq: int, event: Event) -> bytes:
        rendered.append(encode(self, seq, event))
        return rendered[-1]

    monkeypatch.setattr(encoders, "encode", counting)

    @scenario
    async def resume() -> None:
        harness = Harness()
        run = await harness.create("Hi", greedy(300))
        harness.finish(run)
        body = await followed(harness, run.log, run.log.last_seq - 3)
        assert texts(body)[-1] == text_of(run.log)
        assert len(rendered) == 3
        assert b"".join(rendered) == body

    resume()


# Readers that are sent away

_AWAY = {"code": "journal_unavailable", "message": "The log store cannot be reached.", "retryable": True}


def away() -> StorageError:
    return StorageError("The log store cannot be reached.")


@scenario
async def test_a_reader_learns_where_to_follow_again() -> None:
    for view, name in (("native", "native"), ("chat", "foreign")):
        log = long_log(3, ended=False)
        log.release(away())
        *_, last = [message.text for message in parse(b"".join(await written(log, VIEWS[view]))) if "{" in message.text]
        error = json.loads(last)["error"]
        assert error.items() >= {**_AWAY, "stream_id": "s", "last_seq": 3}.items(), name


@scenario
async def test_a_reader_that_comes_when_the_end_was_written_after_all_sees_it() -> None:
    log = long_log(3, ended=False)
    log.release(away())
    log.extend([End("cancelled", Usage(4, 3))])
    body = b"".join(await written(log, VIEWS["native"]))
    assert b"event: cancelled" in body
    assert b"released" not in body


@scenario
async def test_bare_text_is_cut_off() -> None:
    log = long_log(3, ended=False)
    log.release(away())
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    view = VIEWS["plain"]
    await StreamAnswer(log, view.open(facts()), view, after=0, headers={}, heartbeat_s=15.0)(_GET, _never, send)
    assert [message.get("more_body") for message in messages] == [None, True]  # so the server breaks the connection


@scenario
async def test_a_whole_answer_has_the_reason() -> None:
    """It does not say that the server is shutting down when it is not."""
    log = long_log(3, ended=False)
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    answer = WholeAnswer(log, VIEWS["chat"].open(facts()), openai.WIRE, {})
    async with asyncio.TaskGroup() as group:
        group.create_task(answer(_GET, _never, send))
        await turn()
        log.release(away())
    start, body = messages
    assert start["status"] == 503
    assert dict(start["headers"])[b"retry-after"] == b"1"
    # It has sent nothing, so all of the stream is left to read.
    assert json.loads(body["body"])["error"].items() >= {**_AWAY, "stream_id": "s", "last_seq": 0}.items()


async def followed(harness: Harness, log: StreamLog, after: int) -> bytes:
    """Follow GET /generate-stream after an event."""
    body = b""

    async def send(message: Message) -> None:
        nonlocal body
        body += message.get("body", b"")

    models, server = models_of(harness), server_of(harness)
    routes = Routes(ServedWires(), models, server, StreamStarts(models, server))
    scope: Scope = {
        "type": "http",
        "method": "GET",
        "path": "/generate-stream",
        "root_path": "",
        "query_string": f"stream_id={log.stream_id}".encode(),
        "headers": [(b"last-event-id", f"{log.stream_id}-{after}".encode())],
    }
    await Router(routes.table())(scope, _never, send)
    return body
