"""The rest of an app's answer on its way to a log, within one process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from tailrace_outer.serve.link import ChannelClosed

__all__ = ["QueuedBody"]

_MAX_WAITING = 16  # messages; the app waits when there are more


class QueuedBody:
    """An `AnswerBody` without a link. Used on the event loop of the log. `stop` stops the app's work; it is called at
    most once."""

    def __init__(self, stop: Callable[[], object]) -> None:
        self._stop = stop
        self._messages: deque[bytes] = deque()
        self._end: ChannelClosed | None = None
        self._changed = asyncio.Event()
        self._is_over = False
        self._on_over: Callable[[], None] | None = None

    async def put(self, message: bytes) -> None:
        """Wait for room, then add a message. Raises: ChannelClosed if nobody wants more."""
        while len(self._messages) >= _MAX_WAITING and self._end is None:
            await self._wait()
        if self._end is not None:
            raise self._end
        self._messages.append(message)
        self._changed.set()

    def finish(self, failure: bytes | None = None) -> None:
        """The app's work is over. `failure` is a packed `Refusal` if it failed."""
        self._end = self._end or ChannelClosed(failure)
        self._is_over = True
        self._changed.set()
        if self._on_over is not None:
            self._on_over()

    async def receive(self) -> bytes:
        while not self._messages:
            if self._end is not None:
                raise self._end
            await self._wait()
        self._changed.set()
        return self._messages.popleft()

    def close(self) -> None:
        if self._end is None:
            self._end = ChannelClosed()
            self._changed.set()
            self._stop()

    def when_over(self, callback: Callable[[], None]) -> None:
        if self._is_over:
            callback()
        else:
            self._on_over = callback

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
