"""Gives any generator a stream id, a log, resume and cancel, like the built-in wires.

The front keeps the log, so that it outlives the process that feeds it. The process sends an ordinary HTTP answer, which
passes every middleware: a header marks it as a stream, and its body has a frame for each item.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar

import anyio
import msgspec
from starlette.concurrency import iterate_in_threadpool
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tailrace.errors import KINDS, AppFailed, AppOutput, RequestError, TailraceError
from tailrace.system.frames import framed
from tailrace.types import Failure
from tailrace.wording import shown_path
from tailrace_outer.serve.failures import FAILED, failed

__all__ = [
    "STREAM_HEADER",
    "ItemWire",
    "StreamOffer",
    "StreamPart",
    "StreamWire",
    "first_of",
    "item_chunk",
    "resumable",
    "stream",
]

STREAM_HEADER = b"x-tailrace-stream"

ItemWire: TypeAlias = Literal["native", "triton"]
StreamWire: TypeAlias = ItemWire | Literal["recorded"]  # the body unchanged, without frames
StreamPart: TypeAlias = bytes | Failure  # an item as JSON, or how the stream failed


class StreamOffer(msgspec.Struct, frozen=True):
    """The header's content, as JSON: the wire of the events, and how long the stream runs on without a reader."""

    wire: StreamWire = "native"
    linger_s: float | None = None


AnyResponse = TypeVar("AnyResponse", bound=Response)


def resumable(response: AnyResponse, *, linger_s: float | None = None) -> AnyResponse:
    """Mark an answer for recording by `tailrace run`, and return it. The answer gets an id, can be read again from any
    point at `/v1/streams/{id}/events`, and goes on when its client leaves. `tailrace run --resumable` does this for
    every streamed text answer.

    `linger_s` is as in `stream`. Other servers send the answer unchanged, with one unused header.

    Raises: ValueError for an invalid `linger_s`.
    """
    offer = StreamOffer("recorded", _checked_linger(linger_s))
    response.headers[STREAM_HEADER.decode()] = msgspec.json.encode(offer).decode()
    return response


def stream(
    items: AsyncIterable[Any] | Iterable[Any],  # Any: text, or what JSON can hold
    *,
    wire: ItemWire = "native",
    linger_s: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> StreamingResponse:
    """Return an answer whose events have ids and can be read again from any id. The generator is closed when the stream
    is cancelled, not when a reader leaves.

    Text becomes `{"text": …}`; any other item is sent as JSON. The stream is at `/v1/streams/{id}`, which the answer's
    headers name; POST `…/cancel` ends it. Without a reader, it runs on for `linger_s`, by default the server's
    --linger-s. Under a server other than `tailrace run`, the events have no ids.

    Raises: ValueError for an invalid `linger_s`, TypeError for a string, which would be sent letter by letter.
    """
    if isinstance(items, (str, bytes, bytearray)):
        raise TypeError(
            "serve.stream takes a generator or a list of items. Put a single text into a list: serve.stream([text])."
        )
    return _Stream(items, wire, StreamOffer(wire, _checked_linger(linger_s)), dict(headers or {}))


def _checked_linger(linger_s: float | None) -> float | None:
    if linger_s is not None and not 0 <= linger_s < math.inf:
        raise ValueError("linger_s should be a number of seconds from 0.")
    return linger_s


class _Stream(StreamingResponse):
    def __init__(
        self, items: AsyncIterable[Any] | Iterable[Any], wire: ItemWire, offer: StreamOffer, headers: dict[str, str]
    ) -> None:  # Any: as `stream`
        offered = {STREAM_HEADER.decode(): msgspec.json.encode(offer).decode()}
        super().__init__(self._frames(), headers=headers | offered, media_type="text/event-stream")
        self._items = (
            items.__aiter__() if isinstance(items, AsyncIterable) else iterate_in_threadpool(items).__aiter__()
        )
        self._name = getattr(items, "__qualname__", type(items).__name__)
        self._wire = wire
        self._is_hosted = False
        self._route = "a stream"  # for the log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: the generator's exception before its first item, if the wire answers that with a status."""
        self._is_hosted = "tailrace" in (scope.get("extensions") or {})
        self._route = f"{scope.get('method', 'WebSocket')} {shown_path(scope['path'])}"
        if not self._is_hosted:
            del self.headers[STREAM_HEADER.decode()]
        items = self._items
        try:
            if self._wire == "triton":
                first = await first_of(items, receive)
                if first is None:
                    return
                self._items = _chained(first, items)
            await super().__call__(scope, receive, send)
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()

    async def _frames(self) -> AsyncIterator[bytes]:
        try:
            async for item in self._items:
                try:
                    part = _json({"text": item} if isinstance(item, str) else item).encode("ascii")
                except (TypeError, ValueError, RecursionError) as error:
                    yield self._encoded(self._not_json(item, error))
                    return
                yield self._encoded(part)
        except Exception as error:
            yield self._encoded(_failure(error, self._route))
        else:
            if not self._is_hosted and self._wire == "native":
                yield b'event: done\ndata: {"status":"done"}\n\n'

    def _not_json(self, item: object, error: Exception) -> Failure:
        """Report an item that is not JSON: its type to stderr, a short error to the clients."""
        kind = type(item).__name__
        sys.stderr.write(f"{self._route}: {self._name} yielded a {kind} that cannot be JSON: {error}\n")
        return Failure(AppOutput.code, "The app sent an item that cannot be JSON; the app's log has details.")

    def _encoded(self, part: StreamPart) -> bytes:
        if self._is_hosted:
            return framed(msgspec.msgpack.encode(part))
        if isinstance(part, Failure):
            is_retryable = KINDS.get(part.code, AppFailed).is_retryable
            return item_chunk({**part._asdict(), "retryable": is_retryable}, self._wire)
        return item_chunk(part, self._wire)


def item_chunk(part: bytes | Mapping[str, object], wire: ItemWire, event_id: str = "") -> bytes:
    """Encode an item of a stream (JSON), or how it failed (`code`, `message` and more), as a server-sent event."""
    last = f"id: {event_id}\n\n" if event_id else "\n"
    if isinstance(part, bytes):
        return b"data: %b\n%b" % (part, last.encode())
    if wire == "triton":
        more = {name: value for name, value in part.items() if name not in ("code", "message")}
        return f"data: {_json({'error': part['message'], **more})}\n{last}".encode()
    return f"event: error\ndata: {_json({'status': 'error', 'error': part})}\n{last}".encode()


def _failure(error: Exception, route: str) -> Failure:
    """Report an exception of the generator: its traceback to stderr, a short error to the clients."""
    if isinstance(error, RequestError):  # a model rejects the client's input
        return Failure(error.code, error.message)
    message = getattr(error, "client_message", None)  # the error is in the app's log already
    if message is None:
        failure = failed(error, route)
        sys.stderr.write(f"{failure.message}\n{failure.traceback}")
    if isinstance(error, TailraceError):  # a model cannot go on: the message is ours
        return Failure(error.code, error.message)
    return Failure(AppFailed.code, message or FAILED)


async def first_of(items: AsyncIterator[Any], receive: Receive) -> list[Any] | None:  # Any: as `stream`
    """Return a list with the first item, an empty list if there is none, or None if the client disconnects first.

    Raises: the generator's exceptions.
    """
    found: list[Any] | None = None  # Any: as `stream`
    failure: Exception | None = None
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        group.start_soon(watch)
        try:
            found = [await anext(items)]
        except StopAsyncIteration:
            found = []
        except Exception as error:  # raised below: a task group would wrap it
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return found


async def _chained(first: list[Any], rest: AsyncIterator[Any]) -> AsyncIterator[Any]:  # Any: as `stream`
    """Yield the first items, then the rest. The caller closes `rest`: a generator that never starts would not."""
    for item in first:
        yield item
    async for item in rest:
        yield item


def _json(value: object) -> str:
    """Encode as one line of ASCII, so that all clients split lines in the same way. Raises: TypeError."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
