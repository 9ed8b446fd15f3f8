"""A WebSocket as its conversations see it: text frames in and out, and an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.types import Receive, Scope, Send

from tailrace.access.principal import principal_of
from tailrace.dialects.websocket import Close
from tailrace.eventloop import first_error
from tailrace.http.flow import SEND_MANY

__all__ = ["Over", "Socket", "end_of"]

_MAX_FRAMES = 64  # in one write: enough to make it cheap, and other streams on the socket have their turn
_IDLE = Close(1001, "Nothing was said for too long.")


class Over(Exception):
    """The conversation ends: with a close frame, or without one because the client has left."""

    def __init__(self, close: Close | None = None) -> None:
        super().__init__()
        self.close = close


class Socket:
    """One accepted WebSocket: text frames in and out. `max_frames` are sent at once, where the server can do that."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, idle_s: float) -> None:
        self._receive = receive
        self._send = send
        self.max_frames = _MAX_FRAMES if SEND_MANY in scope.get("extensions", {}) else 1
        self.scope = scope
        self.principal = principal_of(scope)
        self._idle_s = idle_s
        self._idle: asyncio.Timeout | None = None  # runs while a frame is awaited
        self._num_busy = 0

    async def text(self) -> str:
        """The next frame. Raises: Over if there is none, or not one of text."""
        try:
            async with asyncio.timeout_at(self._idle_at()) as self._idle:
                message = await self._receive()
        except TimeoutError:
            raise Over(_IDLE) from None
        finally:
            self._idle = None
        if message["type"] == "websocket.disconnect":
            raise Over
        text = message.get("text")
        if text is None:
            raise Over(Close(1003, "Only text frames are understood here."))
        assert isinstance(text, str)
        return text

    async def say(self, *frames: bytes) -> None:
        """Send frames of UTF-8, at most `max_frames`, when there is room.

        Cancellation: either none has been sent or all of them.
        Raises: ConnectionError if the client has left.
        """
        if self.max_frames > 1:
            await self._send({"type": SEND_MANY, "frames": frames})
        else:
            (frame,) = frames
            await self._send({"type": "websocket.send", "text": frame.decode()})

    def busy(self) -> None:
        """Something runs for the client, who need not say anything meanwhile. As often as `free`."""
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
    """How a talk ended. It has no other end than an exception."""
    over = Over()
    try:
        await talk
    except* Over as group:
        error = first_error(group)
        assert isinstance(error, Over)
        over = error
    except* ConnectionError:
        pass  # the client has left
    return over
