"""Serves ASGI over a channel: the scope and the messages of a request, and its answer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message
from starlette.websockets import WebSocketDisconnect

from tailrace.errors import RequestError
from tailrace.wording import shown_path
from tailrace_outer.apps.sent_messages import SentMessages
from tailrace_outer.serve.context import RequestContext, set_request_context
from tailrace_outer.serve.exceptions import BackPressureError
from tailrace_outer.serve.failures import failed, refusal_of
from tailrace_outer.serve.link import Channel, ChannelClosed

__all__ = ["Lifespan", "serve_request"]

_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.decode
_MAX_PART_BYTES = 2**20  # of an answer's body, in one message to the front


async def serve_request(
    app: ASGIApp, channel: Channel, head: bytes, state: MutableMapping[str, Any], app_name: str
) -> None:
    """Answer one request. Prints an exception of the app to stderr, and sends a short error to the front."""
    scope = _decode(head)
    scope["headers"] = [tuple(header) for header in scope["headers"]]
    for name in ("client", "server"):
        scope[name] = tuple(scope[name]) if scope.get(name) is not None else None
    scope["state"] = dict(state)
    request_id = scope["extensions"].get("tailrace", {}).get("request_id", "")
    set_request_context(RequestContext(route=scope["path"], request_id=request_id, app_name=app_name))
    gone = {"type": "http.disconnect"} if scope["type"] == "http" else {"type": "websocket.disconnect", "code": 1006}

    async def receive() -> Message:
        try:
            message: Message = _decode(await channel.receive())
        except ChannelClosed:
            return gone
        return message

    sent = SentMessages(scope)

    async def send(message: Message) -> None:
        checked = sent.checked(message)
        if checked is not None:
            for part in _parts(checked):
                await channel.send(_encode(part))

    try:
        await app(scope, receive, send)
    except ChannelClosed:
        pass
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        if channel.is_closed and isinstance(error, (ClientDisconnect, WebSocketDisconnect)):
            return  # a client that disconnects is not an app failure
        if not isinstance(error, (BackPressureError, RequestError)):  # not app failures
            what = f"{scope.get('method', 'WebSocket')} {shown_path(scope['path'])}"
            failure = failed(error, what, running=scope.get("endpoint"))
            sys.stderr.write(f"{failure.message}\n{failure.traceback}")
        channel.close(_encode(refusal_of(error)))


def _parts(message: Message) -> Iterator[Message]:
    """Split a long body, so that it neither fills the link nor delays other channels."""
    body = message.get("body") or b""
    if len(body) <= _MAX_PART_BYTES:
        yield message
        return
    for start in range(0, len(body), _MAX_PART_BYTES):
        stop = start + _MAX_PART_BYTES
        is_last = stop >= len(body) and not message.get("more_body")
        yield {**message, "body": bytes(body[start:stop]), "more_body": not is_last}


class Lifespan:
    """An ASGI app's startup and shutdown, for apps that support the lifespan protocol."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}  # Any: as in ASGI
        self._events: asyncio.Queue[Message] = asyncio.Queue(1)
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure: str | None = None  # of the startup
        self._task: asyncio.Task[None]

    @classmethod
    async def start(cls, app: ASGIApp) -> Lifespan:
        """Run the startup. Raises: the app's exception; RuntimeError with the app's message if it only reports a
        failure."""
        lifespan = cls()
        lifespan._task = asyncio.get_running_loop().create_task(lifespan._run(app))
        await lifespan._events.put({"type": "lifespan.startup"})
        await lifespan._started
        return lifespan

    async def stop(self) -> None:
        """Run the shutdown. Raises: RuntimeError if the app's shutdown fails."""
        if not self._task.done():
            await self._events.put({"type": "lifespan.shutdown"})
            await self._stopped
            await self._task

    async def _run(self, app: ASGIApp) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        error: BaseException | None = None
        try:
            await app(scope, self._events.get, self._send)
        except Exception as problem:
            error = problem
        if not self._started.done():
            if self._failure is not None:
                self._started.set_exception(error or RuntimeError(self._failure))
            error = None  # raised already; or the app does not support lifespan
        for future in (self._started, self._stopped):
            if not future.done():
                future.set_result(None)
        if error is not None and not isinstance(error, asyncio.CancelledError):
            sys.stderr.write(failed(error, "the lifespan").traceback)

    async def _send(self, message: Message) -> None:
        step, _, outcome = message["type"].removeprefix("lifespan.").partition(".")
        future = self._started if step == "startup" else self._stopped
        if future.done():
            return
        if outcome == "failed" and step == "startup":
            self._failure = message.get("message") or "the app failed to start"  # most apps raise the cause next
        elif outcome == "failed":
            future.set_exception(RuntimeError(message.get("message") or "the shutdown of the app failed"))
        else:
            future.set_result(None)
