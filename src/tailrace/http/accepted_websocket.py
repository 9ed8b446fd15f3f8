"""An accepted WebSocket: text frames in and out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from starlette.types import Receive, Scope, Send

from tailrace.access.principal import AUTHENTICATE, PRINCIPAL, Principal, principal_of
from tailrace.dialects.bodies import JsonBody, read_json
from tailrace.dialects.websocket import Close
from tailrace.errors import RequestError
from tailrace.system.eventloop import first_error
from tailrace.transport.websocket_parts import LARGER, SEND_MANY, LargeMessages

__all__ = ["UNAUTHENTICATED", "Over", "Socket", "end_of"]

_MAX_FRAMES = 64  # per write: enough to be cheap, and other streams on the socket get their turn
_MAX_UNREADABLE = 10  # frames in a row
_DONE = (1000, 1005)  # a close frame that says so, or one without a code (RFC 6455, 7.4.1)
_IDLE = Close(1001, "The connection was idle for too long.")
UNAUTHENTICATED = Close(1008, "What has opened this WebSocket is not valid any more.")


class Over(Exception):
    """The WebSocket ends: with a close frame, or without one because the client has disconnected."""

    def __init__(self, close: Close | None = None) -> None:
        super().__init__()
        self.close = close


class Socket:
    """One accepted WebSocket. `max_frames` is how many frames one `say` may send; 1 if the ASGI server lacks the
    extension."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, idle_s: float) -> None:
        self._receive = receive
        self._send = send
        self.max_frames = _MAX_FRAMES if SEND_MANY in scope.get("extensions", {}) else 1
        self.scope = scope
        self._idle_s = idle_s
        self._idle: asyncio.Timeout | None = None  # runs while a frame is awaited
        self._num_busy = 0
        self._num_unreadable = 0
        self._closed_by_client: int | None = None  # the code

    @property
    def principal(self) -> Principal:
        return principal_of(self.scope)

    def allow_larger(self, most_bytes: int, messages: LargeMessages) -> None:
        """Let messages be as large from now on, if the ASGI server can."""
        if (allow := self.scope.get("extensions", {}).get(LARGER)) is not None:
            allow(most_bytes, messages)

    def authenticate(self) -> None:
        """Check again what has opened the socket, which may stay open for long. Raises: Unauthenticated."""
        if (authenticate := self.scope.get(AUTHENTICATE)) is not None:  # else an outer application authenticates
            self.scope[PRINCIPAL] = authenticate()

    async def text(self) -> str:
        """Return the next frame. Raises: Over if the client has disconnected, was idle too long, or sent a binary
        frame."""
        try:
            async with asyncio.timeout_at(self._idle_at()) as self._idle:
                message = await self._receive()
        except TimeoutError:
            raise Over(_IDLE) from None
        finally:
            self._idle = None
        if message["type"] == "websocket.disconnect":
            self._closed_by_client = message.get("code", 1006)
            raise Over
        text = message.get("text")
        if text is None:
            raise Over(Close(1003, "Only text frames are supported."))
        assert isinstance(text, str)
        return text

    async def is_done(self) -> bool:
        """Return whether the client, which has disconnected, said that it needs nothing more. Otherwise it has lost its
        connection, or goes away."""
        while self._closed_by_client is None:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                self._closed_by_client = message.get("code", 1006)
        return self._closed_by_client in _DONE

    def read_json(self, text: bytes) -> JsonBody:
        """Read a frame as a JSON object. Raises: RequestError; Over if many frames in a row are none."""
        try:
            body = read_json(text)
        except RequestError:
            self._num_unreadable += 1
            if self._num_unreadable > _MAX_UNREADABLE:
                raise Over(Close(1008, "Too many frames are not JSON objects.")) from None
            raise
        self._num_unreadable = 0
        return body

    async def say_all(self, frames: Sequence[bytes]) -> None:
        """As `say`, for any number of frames."""
        for start in range(0, len(frames), self.max_frames):
            await self.say(*frames[start : start + self.max_frames])

    async def say(self, *frames: bytes) -> None:
        """Send UTF-8 frames, at most `max_frames`, when the transport has room.

        Cancellation: either all frames were sent or none.
        Raises: ConnectionError if the client has disconnected.
        """
        if self.max_frames > 1:
            await self._send({"type": SEND_MANY, "frames": frames})
        else:
            (frame,) = frames
            await self._send({"type": "websocket.send", "text": frame.decode()})

    def busy(self) -> None:
        """Suspend the idle timeout while a request of the client runs. Call `free` as often."""
        self._num_busy += 1
        self._reschedule()

    def free(self) -> None:
        self._num_busy -= 1
        self._reschedule()

    def _reschedule(self) -> None:
        if self._idle is not None and not self._idle.expired():
            self._idle.reschedule(self._idle_at())

    def _idle_at(self) -> float | None:
        if self._num_busy or not self._idle_s:
            return None
        return asyncio.get_running_loop().time() + self._idle_s


async def end_of(talk: Awaitable[None]) -> Over:
    """Await a coroutine that only ends with an exception, and return how it ended."""
    over = Over()
    try:
        await talk
    except* Over as group:
        error = first_error(group)
        assert isinstance(error, Over)
        over = error
    except* ConnectionError:
        pass  # the client has disconnected
    return over
