"""Responses: errors in the form of their dialect, answers in one piece, and the writer of streams."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, Generic, TypeVar, assert_never

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.dialects import Encoder, Wire
from tailrace.dialects.wire import CumulativeEncoder, Presentation, failure_of
from tailrace.errors import Cancelled, TailraceError
from tailrace.streams import Reader, StreamLog
from tailrace.types import ContentT, End, Released

__all__ = [
    "ANSWERED",
    "NO_INDEX",
    "STREAM_HEADERS",
    "JsonAnswer",
    "StreamAnswer",
    "WholeAnswer",
    "WithHeaders",
    "client_disconnected",
    "error_answer",
    "unless_left",
]

NO_INDEX = {"x-robots-tag": "noindex, nofollow, noarchive"}
STREAM_HEADERS = {
    "cache-control": "no-cache, no-transform",  # proxies must not delay it to compress it
    "x-accel-buffering": "no",  # nginx must not buffer it, either
    "x-content-type-options": "nosniff",
}


T = TypeVar("T")

ANSWERED = "tailrace_answered"  # in a scope: a list for the StreamLog that answers the request, if somebody wants it
_WRITE_BYTES = 64 * 2**10  # about how much is encoded per write, and waits for a slow socket


class JsonAnswer(Response):
    media_type = "application/json"


def error_answer(wire: Wire, error: TailraceError) -> Response:
    """Return an error response."""
    status, body = wire.encode_error(error)
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if status in (408, 413):
        headers["connection"] = "close"  # so that the rest of the body need not be read
    return JsonAnswer(body, status, headers)


class WithHeaders:
    """An ASGI application that adds headers to another one's response. A header that both have becomes one list."""

    def __init__(self, answer: ASGIApp, headers: Mapping[str, str]) -> None:
        self._answer = answer
        self._headers = Headers(headers).raw

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = dict(self._headers)
                headers = [
                    (name, b"%b, %b" % (value, more.pop(name)) if name in more else value)
                    for name, value in message["headers"]
                ]
                message = {**message, "headers": [*headers, *more.items()]}
            await send(message)

        await self._answer(scope, receive, send_more)


async def client_disconnected(receive: Receive) -> None:
    """Return when the client has disconnected. ASGI servers report this only to a pending `receive`."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work. If the client leaves first, the work is cancelled. Raises: Cancelled then."""
    working = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(client_disconnected(receive))
    try:
        await asyncio.wait((working, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("The client has left.")
        return working.result()
    finally:
        for task in (working, watcher):
            task.cancel()
        await asyncio.wait((working, watcher))


class StreamAnswer(Generic[ContentT]):
    """Writes a log to one client: an ASGI application.

    All events that are ready go out in one write of limited size. On wires whose newest event repeats the earlier ones,
    a slow reader skips the earlier ones. When the client disconnects, only its reader ends; the producer decides what
    happens to the stream. If the wire has no form for the reason why a stream is cut off, the connection is closed
    without the last chunk, so that the answer does not look complete.
    """

    __slots__ = (
        "_after",
        "_encoder",
        "_headers",
        "_heartbeat",
        "_heartbeat_s",
        "_is_disconnected",
        "_log",
    )

    def __init__(
        self,
        log: StreamLog[ContentT],
        encoder: Encoder[ContentT],
        view: Presentation,
        *,
        after: int,
        headers: Iterable[tuple[str, str]],
        heartbeat_s: float,
    ) -> None:
        self._log = log
        self._encoder = encoder
        self._after = after
        self._heartbeat = view.heartbeat
        self._heartbeat_s = heartbeat_s if view.heartbeat else 0.0
        given = [(name.lower(), value) for name, value in headers]
        usual = {**STREAM_HEADERS, "content-type": view.media_type}
        for name, _ in given:
            usual.pop(name, None)
        self._headers = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in (*usual.items(), *given)
            if name != "content-length"
        ]
        self._is_disconnected = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.get(ANSWERED, []).append(self._log)
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        self._headers = []  # a kilobyte that an idle reader would keep
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body"})
            return
        with Reader(self._log, self._after, shows_progress=self._encoder.shows_progress) as reader:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(self._watch(receive, reader))
                await self._write(reader, send)
                watcher.cancel()

    async def _write(self, reader: Reader[ContentT], send: Send) -> None:
        while True:
            taken = await reader.next(self._heartbeat_s)
            if self._is_disconnected:
                return
            match taken:
                case list():
                    chunk = self._encode(reader, taken) if taken else self._beat(reader)
                    if chunk:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    if len(chunk) >= _WRITE_BYTES:
                        self._skip_stale(reader)
                    if reader.cursor + 1 < self._log.last_seq:  # not before the end alone
                        await asyncio.sleep(0)  # `send` may return without suspending
                case End() | Released():
                    with contextlib.suppress(TailraceError):
                        last = self._encoder.encode(reader.cursor, taken)
                        if last or isinstance(taken, End):
                            await send({"type": "http.response.body", "body": last})
                    return
                case never:
                    assert_never(never)

    def _encode(self, reader: Reader[ContentT], events: list[ContentT]) -> bytes:
        """Encode events for one write, and set the reader back to the last of them."""
        chunks: list[bytes] = []
        num_bytes, seq = 0, reader.cursor - len(events)
        for event in events:
            seq += 1
            chunk = self._encoder.encode(seq, event)
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes >= _WRITE_BYTES:
                break
        reader.cursor = seq
        return b"".join(chunks)

    def _beat(self, reader: Reader[ContentT]) -> bytes:
        """Return progress, or a heartbeat after a silence."""
        progress = reader.take_progress()
        return self._encoder.beat(self._heartbeat) if progress is None else self._encoder.progress(progress)

    def _skip_stale(self, reader: Reader[ContentT]) -> None:
        """Skip the events that the newest one repeats."""
        if isinstance(self._encoder, CumulativeEncoder):
            events = self._log.events[reader.cursor :]
            num_stale = self._encoder.num_stale(events)
            self._encoder.skip(events[:num_stale])
            reader.cursor += num_stale

    async def _watch(self, receive: Receive, reader: Reader[ContentT]) -> None:
        await client_disconnected(receive)
        self._is_disconnected = True
        reader.wake()


class WholeAnswer:
    """Waits for the end of a log, then answers in one piece: an ASGI application."""

    def __init__(self, log: StreamLog, encoder: Encoder, wire: Wire, headers: Mapping[str, str]) -> None:
        self._log = log
        self._encoder = encoder
        self._wire = wire
        self._headers = dict(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.get(ANSWERED, []).append(self._log)
        with Reader(self._log, at_end_only=True) as reader:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(self._watch(receive, reader))
                taken = await reader.next()
                watcher.cancel()
        try:
            match taken:
                case list():
                    return  # the client has left
                case Released():
                    raise failure_of(taken)
                case End():
                    body = self._encoder.whole(self._log.events)
                    response: Response = JsonAnswer(body, headers={**self._headers, **self._encoder.headers})
                case never:
                    assert_never(never)
        except TailraceError as error:
            response = error_answer(self._wire, error)
            response.headers.update(self._headers)
        with contextlib.suppress(ConnectionError):
            await response(scope, receive, send)

    async def _watch(self, receive: Receive, reader: Reader) -> None:
        await client_disconnected(receive)
        reader.wake()
