"""Answers with a response that runs or has ended: its events, or the whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.dialects import SSE, to_json
from tailrace.errors import Cancelled
from tailrace.server import HEARTBEAT, STREAM_HEADERS, client_disconnected, unless_left
from tailrace_plugins.tool_loop.loop import Loop
from tailrace_plugins.tool_loop.loop_output import OutEvent
from tailrace_plugins.tool_loop.mcp_errors import UnknownLoop

__all__ = ["WRITE_EVENTS", "EventsAnswer", "begun_answer", "deleted", "has_begun", "keepalive", "response_of"]

WRITE_EVENTS = 256  # at a time


def response_of(loop: Loop) -> Response:
    """Return the response object as it is now."""
    return Response(to_json(loop.response()), media_type="application/json", headers=loop.headers)


def keepalive(loop: Loop) -> list[OutEvent]:
    """Return what OpenAI's servers send in a silence, with the number of the event before it; nothing before the
    first event."""
    number = len(loop.output.events) - 1
    return [OutEvent("keepalive", to_json({"type": "keepalive", "sequence_number": number}))] if number >= 0 else []


def deleted(loop: Loop) -> Response:
    body = {"id": f"resp_{loop.begun.loop_id}", "object": "response", "deleted": True}
    return Response(to_json(body), media_type="application/json")


async def has_begun(loop: Loop, receive: Receive | None = None) -> None:
    """Return as soon as there is an event, or the client has left. Raises: TailraceError if the response does not
    begin."""
    with loop.waiting(), contextlib.suppress(Cancelled):
        await (loop.wait(0) if receive is None else unless_left(receive, loop.wait(0)))
    if loop.refusal is not None:
        raise loop.refusal


async def begun_answer(loop: Loop, request: Request, *, is_stream: bool, heartbeat_s: float) -> ASGIApp:
    """Return an answer, as soon as there is an event: with the events, or with the response object at the end. Until
    then, the body of the request counts as memory of the server.

    Raises: TailraceError if the response does not begin.
    """
    await has_begun(loop, request.receive)
    return EventsAnswer(loop, 0, heartbeat_s) if is_stream else _WholeAnswer(loop)


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
    """Writes the response object to a client at the end: an ASGI application. Raises: UnknownLoop if the response was
    deleted meanwhile, before it writes anything."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = self._loop
        with contextlib.suppress(Cancelled):
            while not loop.has_ended:
                with loop.reading():
                    await unless_left(receive, loop.ended())
                if loop.is_lost:
                    loop = await unless_left(receive, loop.again())
        await response_of(loop)(scope, receive, send)


class EventsAnswer:
    """Writes the events after the first ones to a client: an ASGI application."""

    def __init__(self, loop: Loop, num_seen: int, heartbeat_s: float) -> None:
        self._loop = loop
        self._heartbeat_s = heartbeat_s or None
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
            ready = loop.output.events[num_seen : num_seen + WRITE_EVENTS]
            self._num_seen += len(ready)
            if ready:
                await send(_part(ready))
            elif loop.has_ended:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            elif loop.is_lost:
                return
            else:
                waiting = asyncio.ensure_future(loop.wait(num_seen))
                await asyncio.wait((waiting, watching), timeout=self._heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    waiting.cancel()
                    beat = keepalive(loop)
                    await send(_part(beat) if beat else _BEAT)


_BEAT: Message = {"type": "http.response.body", "body": HEARTBEAT, "more_body": True}


def _part(events: Sequence[OutEvent]) -> Message:
    return {"type": "http.response.body", "body": b"".join(event.sse for event in events), "more_body": True}
