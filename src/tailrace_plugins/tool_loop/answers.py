"""Answers with a response that runs or has ended: its events, or the whole."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tailrace.dialects import SSE, to_json
from tailrace.errors import Cancelled, TailraceError
from tailrace.server import HEARTBEAT, STREAM_HEADERS, InnerAnswer, client_disconnected, unless_left
from tailrace_plugins.tool_loop.errors import UnknownLoop
from tailrace_plugins.tool_loop.loop import Loop

__all__ = ["EventsAnswer", "begun_answer", "deleted", "response_of"]

_WRITE_EVENTS = 256  # at a time
_BEAT_S = 10.0


def response_of(loop: Loop) -> Response:
    """Return the response object as it is now."""
    return Response(to_json(loop.response()), media_type="application/json", headers=loop.headers)


def deleted(loop: Loop) -> Response:
    body = {"id": f"resp_{loop.begun.loop_id}", "object": "response", "deleted": True}
    return Response(to_json(body), media_type="application/json")


async def begun_answer(loop: Loop, request: Request, *, is_stream: bool) -> ASGIApp:
    """Return an answer, as soon as there is an event: with the events, or with the response object at the end. Until
    then, the body of the request counts as memory of the server.

    Raises: TailraceError if the response does not begin.
    """
    with loop.waiting(), contextlib.suppress(Cancelled):
        await unless_left(request.receive, loop.wait(0))
    if loop.refusal is not None:
        return _refused(loop.refusal)
    return EventsAnswer(loop, 0) if is_stream else _WholeAnswer(loop)


def _refused(refusal: InnerAnswer | TailraceError) -> Response:
    """Raises: TailraceError, for the wire's own form."""
    if isinstance(refusal, TailraceError):
        raise refusal
    names = ("content-type", "retry-after")
    headers = {name: refusal.headers[name] for name in names if name in refusal.headers}
    return Response(refusal.body, refusal.status, headers)


async def _found_again(loop: Loop, watching: asyncio.Future[None]) -> Loop | None:
    """Return a response that this server has lost, where it is now; None if it is deleted, or the client has left."""
    finding = asyncio.ensure_future(loop.again())
    try:
        await asyncio.wait((finding, watching), return_when=asyncio.FIRST_COMPLETED)
        with contextlib.suppress(UnknownLoop):
            return finding.result() if finding.done() else None
        return None
    finally:
        finding.cancel()


class _WholeAnswer:
    """Writes the response object to a client at the end: an ASGI application."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = self._loop
        with contextlib.suppress(Cancelled, UnknownLoop):
            while not loop.has_ended:
                with loop.reading():
                    await unless_left(receive, loop.ended())
                if loop.is_lost:
                    loop = await unless_left(receive, loop.again())
        await response_of(loop)(scope, receive, send)


class EventsAnswer:
    """Writes the events after the first ones to a client: an ASGI application."""

    def __init__(self, loop: Loop, num_seen: int) -> None:
        self._loop = loop
        self._num_seen = num_seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {**STREAM_HEADERS, "content-type": SSE, **self._loop.headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        watching = asyncio.ensure_future(client_disconnected(receive))
        loop: Loop | None = self._loop
        try:
            while loop is not None:
                with loop.reading():
                    await self._write(loop, send, watching)
                loop = await _found_again(loop, watching) if loop.is_lost else None
        finally:
            watching.cancel()

    async def _write(self, loop: Loop, send: Send, watching: asyncio.Future[None]) -> None:
        """Return at the end of the response, when the client has left, or when this server has lost the response."""
        while not watching.done():
            num_seen = self._num_seen
            ready = loop.output.events[num_seen : num_seen + _WRITE_EVENTS]
            self._num_seen += len(ready)
            if ready:
                await send({"type": "http.response.body", "body": b"".join(ready), "more_body": True})
            elif loop.has_ended:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            elif loop.is_lost:
                return
            else:
                waiting = asyncio.ensure_future(loop.wait(num_seen))
                await asyncio.wait((waiting, watching), timeout=_BEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    waiting.cancel()
                    await send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})
