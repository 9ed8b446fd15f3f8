"""Giving any generator a stream id, a log, resume and cancel, as the built-in wires have them.

The log is the front's, where it outlives the process that feeds it. What crosses is an ordinary answer with a header
that the front knows, and a frame for each item in its body, so that every middleware lets it pass.
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

from tailrace.errors import AppOutput, RequestError
from tailrace.frames import framed
from tailrace.serve.failures import FAILED, failed
from tailrace.spelling import shown_path
from tailrace.types import Failure

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
StreamWire: TypeAlias = ItemWire | Literal["recorded"]  # the body as it is, and no frames
StreamPart: TypeAlias = str | Failure  # an item as JSON, or how the stream failed


class StreamOffer(msgspec.Struct, frozen=True):
    """What the header says, as JSON: how the events are shown, and how long the stream runs on with nobody reading."""

    wire: StreamWire = "native"
    linger_s: float | None = None


AnyResponse = TypeVar("AnyResponse", bound=Response)


def resumable(response: AnyResponse, *, linger_s: float | None = None) -> AnyResponse:
    """The same answer, to be recorded by `tailrace run`: it gets an id, can be read again from any point at
    `/v1/streams/{id}/events`, and goes on when its client leaves. `tailrace run --resumable` does so for every streamed
    answer of text.

    `linger_s` is as in `stream`. Other servers send the answer as it is, with one header more that nobody reads.

    Raises: ValueError for a `linger_s` that is no time.
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
    """An answer whose events have ids, that can be read again from any of them, and whose generator is closed when the
    stream is cancelled and not when a reader leaves.

    Text becomes `{"text": …}`, anything else the JSON that it is. The stream is at `/v1/streams/{id}`, as the answer's
    headers say; POST `…/cancel` ends it. With nobody reading it runs on for `linger_s`, by default as long as the
    server's --linger-s. Started by another server than `tailrace run`, the events are the same and have no ids.

    Raises: ValueError for a `linger_s` that is no time, TypeError for text, which would come letter by letter.
    """
    if isinstance(items, (str, bytes, bytearray)):
        raise TypeError("serve.stream takes a generator or a list of items. A text is one item: serve.stream([text]).")
    return _Stream(items, wire, StreamOffer(wire, _checked_linger(linger_s)), dict(headers or {}))


def _checked_linger(linger_s: float | None) -> float | None:
    if linger_s is not None and not 0 <= linger_s < math.inf:
        raise ValueError("linger_s is a number of seconds.")
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
        """Raises: what the generator raises before its first item, where the wire answers that with a status."""
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
                    part = _json({"text": item} if isinstance(item, str) else item)
                except (TypeError, ValueError, RecursionError) as error:
                    yield self._shown(self._unshowable(item, error))
                    return
                yield self._shown(part)
        except Exception as error:
            yield self._shown(_failure(error, self._route))
        else:
            if not self._is_hosted and self._wire == "native":
                yield b'event: done\ndata: {"status":"done"}\n\n'

    def _unshowable(self, item: object, error: Exception) -> Failure:
        """What its clients are told of an item that JSON cannot hold; its author reads which on the terminal."""
        kind = type(item).__name__
        sys.stderr.write(f"{self._route}: {self._name} gave a {kind} that JSON cannot hold: {error}\n")
        return Failure(AppOutput.code, "The app sent what JSON cannot hold; its log says what.")

    def _shown(self, part: StreamPart) -> bytes:
        if self._is_hosted:
            return framed(msgspec.msgpack.encode(part))
        return item_chunk(part, self._wire)


def item_chunk(part: StreamPart, wire: ItemWire, event_id: str = "") -> bytes:
    """A part of a stream as server-sent events have it."""
    last = f"id: {event_id}\n\n" if event_id else "\n"
    if isinstance(part, Failure):
        error = {"code": part.code, "message": part.message}
        shown: object = {"error": part.message} if wire == "triton" else {"status": "error", "error": error}
        kind = "" if wire == "triton" else "event: error\n"
        return f"{kind}data: {_json(shown)}\n{last}".encode()
    return f"data: {part}\n{last}".encode()


def _failure(error: Exception, route: str) -> Failure:
    """What its clients are told of a stream that raises; its author reads the rest on the terminal."""
    if isinstance(error, RequestError):  # of a model's, about what the client has asked
        return Failure(error.code, error.message)
    words = getattr(error, "told_to_clients", None)  # of one whose author has been told already
    if words is None:
        told = failed(error, route)
        sys.stderr.write(f"{told.message}\n{told.traceback}")
    return Failure("app_failed", words or FAILED)


async def first_of(items: AsyncIterator[Any], receive: Receive) -> list[Any] | None:  # Any: as `stream`
    """The first item; no item if there is none; None if the client has left before it came.

    Raises: what the generator raises.
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
    """Whoever calls closes `rest`: a generator that was never started would not."""
    for item in first:
        yield item
    async for item in rest:
        yield item


def _json(value: object) -> str:
    """One line, ASCII only, so that every client splits lines alike. Raises: TypeError for what JSON cannot hold."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
