"""Passes one request to a process of user code, and its answer back."""

from __future__ import annotations

import asyncio
import time
from collections import deque

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.access.principal import owner_of
from tailrace.dialects.websocket import Close
from tailrace.errors import (
    SHUTTING_DOWN,
    AdmissionError,
    AppFailed,
    AppUnavailable,
    BodyTimeout,
    BodyTooLarge,
    Draining,
    TailraceError,
)
from tailrace.settings import Settings
from tailrace.types import ANONYMOUS
from tailrace_outer.apps.app_streams import AppStreams
from tailrace_outer.apps.offers import take_offer
from tailrace_outer.apps.pool import DRAIN_RETRY_S, Pool, ReplicaLease
from tailrace_outer.serve.failures import Refusal
from tailrace_outer.serve.link import Channel, ChannelClosed, LinkLost
from tailrace_outer.serve.stream import item_chunk

__all__ = ["Relay"]

_RETRY_S = 1.0
_MAX_EARLY_BYTES = 64 * 2**10
_START_TYPES = ("http.response.start", "websocket.accept", "websocket.http.response.start")
_DISCONNECT_TIMEOUT_S = 10.0  # for the app to notice that a WebSocket's client has left
_DISCONNECT_TYPES = ("http.disconnect", "websocket.disconnect")
_decode = msgspec.msgpack.decode
_encode = msgspec.msgpack.encode
_SCOPE = (
    "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers",
    "client", "server", "subprotocols",
)  # fmt: skip


class Relay:
    """Carries the messages of one request, once a process of the pool has a free slot. Holds the slot to the end, or
    hands it over if the app turns the answer into a stream with a log."""

    def __init__(
        self, pool: Pool, app_name: str, settings: Settings, streams: AppStreams, *, is_resumable: bool = False
    ) -> None:
        self._pool = pool
        self._is_resumable = is_resumable  # whether all streamed answers are recorded
        self._method = ""
        self._owner = ANONYMOUS
        self._in_body = False  # more of the request's body is to come
        self._app_name = app_name
        self._settings = settings
        self._streams = streams
        self._has_begun = False
        self._is_complete = False
        self._is_sse = False
        self._is_websocket = False
        self._refusal: TailraceError | None = None  # of the request's body
        self._is_gone = False
        self._body_s = (
            settings.body_s
        )  # time left to wait for the client's body; backpressure of the app does not count
        self._holds_lease = True
        self._received_early: deque[Message] = deque()  # messages that came while the request was queued
        self._resendable: list[Message] = []  # sent, but the app has not begun: at most one link window
        self._can_retry = False  # the process died before the app began

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: TailraceError if nothing was sent yet. Later failures end the answer, with an error event if
        possible."""
        self._is_websocket = scope["type"] == "websocket"
        self._owner = owner_of(scope)
        self._method, self._in_body = scope.get("method", ""), not self._is_websocket
        while await self._attempt(scope, receive, send):
            self._received_early.extendleft(reversed(self._resendable))
            self._resendable.clear()
            self._in_body = not self._is_websocket

    async def _attempt(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Send the request to one process. Returns True if it has to be retried: the process died before the app had
        begun. Raises: as `__call__`."""
        lease = await self._lease(receive)
        if lease is None:
            return False
        kind = "websocket" if self._is_websocket else "asgi"
        channel = lease.replica.link.open(kind, _encode(_app_scope(scope)))
        try:
            forwarding = asyncio.get_running_loop().create_task(self._forward_request(receive, channel))
            try:
                stream = await self._forward_response(channel, lease, send)
            finally:
                forwarding.cancel()
                await asyncio.gather(forwarding, return_exceptions=True)
            if stream is not None:
                await stream(scope, receive, send)
            return self._can_retry
        finally:
            if self._holds_lease:
                channel.close()
                channel.when_over(lease.release)

    # From the client

    async def _lease(self, receive: Receive) -> ReplicaLease | None:
        """Wait for a slot in a process. Returns None if the client disconnects first."""
        if self._pool.has_room:
            return await self._pool.lease()
        loop = asyncio.get_running_loop()
        waiting, reading = loop.create_task(self._pool.lease()), loop.create_task(self._until_disconnect(receive))
        try:
            await asyncio.wait([waiting, reading], return_when=asyncio.FIRST_COMPLETED)
            return waiting.result() if waiting.done() else None
        except asyncio.CancelledError:
            if waiting.done() and waiting.exception() is None:
                waiting.result().release()
            raise
        finally:
            waiting.cancel()
            reading.cancel()
            await asyncio.gather(waiting, reading, return_exceptions=True)

    async def _until_disconnect(self, receive: Receive) -> None:
        num_bytes = 0
        while num_bytes < _MAX_EARLY_BYTES:
            message = await receive()
            self._received_early.append(message)
            if message["type"] in _DISCONNECT_TYPES:
                return
            num_bytes += sum(len(message.get(part) or b"") for part in ("body", "bytes", "text")) + 1
        await (
            asyncio.get_running_loop().create_future()
        )  # the rest of a longer body stays in the socket until there is a slot

    async def _forward_request(self, receive: Receive, channel: Channel) -> None:
        is_http = not self._is_websocket
        num_bytes = 0
        try:
            while True:
                message = await self._next(receive)
                if message["type"] in _DISCONNECT_TYPES:
                    if self._is_complete:  # ASGI sends a disconnect after each complete answer
                        return  # the app may still run background tasks
                    self._is_gone = True
                    channel.post(_encode(dict(message)))
                    if not is_http:
                        await asyncio.sleep(_DISCONNECT_TIMEOUT_S)
                    channel.close()
                    return
                num_bytes += len(message.get("body", b""))
                if is_http and num_bytes > self._settings.body_bytes:
                    raise BodyTooLarge(f"The body is larger than {self._settings.body_bytes} bytes.")
                if not channel.has_begun:
                    self._resendable.append(message)
                elif self._resendable:
                    self._resendable.clear()
                await channel.send(_encode(dict(message)))
                self._in_body = self._in_body and bool(message.get("more_body"))
        except ChannelClosed:
            pass
        except TailraceError as refusal:
            self._refusal = refusal
            channel.close()

    async def _next(self, receive: Receive) -> Message:
        if self._received_early:
            return self._received_early.popleft()
        if not self._in_body:
            return await receive()
        try:
            began_s = time.monotonic()
            async with asyncio.timeout(min(self._settings.body_gap_s, self._body_s)):
                return await receive()
        except TimeoutError:
            raise BodyTimeout("The body of the request did not arrive in time.") from None
        finally:
            self._body_s -= time.monotonic() - began_s

    # From the app

    async def _forward_response(self, channel: Channel, lease: ReplicaLease, send: Send) -> ASGIApp | None:
        """Forward the whole answer. If the app turns it into a stream with a log, return that stream instead."""
        self._can_retry = False
        try:
            while True:
                message: Message = _decode(await channel.receive())
                self._resendable.clear()  # the app has begun
                if message["type"] in _START_TYPES:
                    message["headers"] = [(name, value) for name, value in message.get("headers") or ()]
                if message["type"] == "http.response.start":
                    self._is_sse = _media_type(message).startswith("text/event-stream")
                    offer = take_offer(
                        message, method=self._method, in_body=self._in_body, records_all=self._is_resumable
                    )
                    if offer is not None:
                        headers = [
                            (name.decode("latin-1").lower(), value.decode("latin-1"))
                            for name, value in message["headers"]
                        ]
                        stream = await self._streams.begin(
                            offer, self._owner, self._app_name, channel, headers, on_over=lease.release
                        )
                        self._holds_lease = False
                        return stream
                self._has_begun = True
                self._is_complete = message["type"] in ("websocket.close", "websocket.http.response.body") or (
                    message["type"] == "http.response.body" and not message.get("more_body")
                )
                await send(message)
        except ChannelClosed as end:
            self._can_retry = (
                isinstance(end, LinkLost) and not channel.has_begun and not self._is_gone and self._refusal is None
            )
            if not (self._is_complete or self._is_gone or self._can_retry):
                await self._fail(end, send)
            return None

    async def _fail(self, end: ChannelClosed, send: Send) -> None:
        """Raise the error before the first byte. Later, send an error event or a close frame, or cut the answer off."""
        error = self._refusal or self._error_of(end)
        if not self._has_begun:
            raise error
        if self._is_websocket:
            code, reason = 1011, error.message
            if isinstance(error, (AppUnavailable, Draining)):
                code = 1012
            elif end.failure is None:
                code, reason = 1000, ""
            close = Close.with_reason(code, reason)
            await send({"type": "websocket.close", "code": close.code, "reason": close.reason})
        elif self._is_sse:
            shown = {"code": error.code, "message": error.message, "retryable": error.is_retryable}
            body = b"\n\n" + item_chunk(shown, "native")  # an event of the app may be incomplete
            await send({"type": "http.response.body", "body": body, "more_body": True})

    def _error_of(self, end: ChannelClosed) -> TailraceError:
        if end.failure is None and self._pool.is_draining:
            return Draining(SHUTTING_DOWN, retry_after_s=DRAIN_RETRY_S)
        if isinstance(end, LinkLost):
            return AppUnavailable("The process of the app died.", retry_after_s=_RETRY_S)
        if end.failure is None:
            return AppFailed("The app gave no answer.")
        refusal = _decode(end.failure, type=Refusal)
        is_temporary = refusal.status in (429, 503)
        retry_after_s = refusal.retry_after_s or (_RETRY_S if is_temporary else None)
        kind = AdmissionError if is_temporary else AppFailed
        error: TailraceError = kind(refusal.message, param=refusal.param, retry_after_s=retry_after_s)
        error.status, error.code = refusal.status, refusal.code
        return error


def _media_type(message: Message) -> str:
    return next((value.decode("latin-1") for name, value in message["headers"] if name.lower() == b"content-type"), "")


def _app_scope(scope: Scope) -> dict[str, object]:
    """Return the part of a scope that the app gets."""
    out: dict[str, object] = {name: scope[name] for name in _SCOPE if name in scope}
    out["extensions"] = {"tailrace": {"request_id": scope.get("tailrace_request_id", "")}}
    if "websocket.http.response" in (scope.get("extensions") or {}):
        out["extensions"]["websocket.http.response"] = {}  # type: ignore[index]  # a dict, made just now
    return out
