"""What one call of `infer` gives, on its way from whatever thread sends it to the event loop that reads it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from tailrace.serve.inferless.errors import OutputError, StreamCancelled

__all__ = ["Events"]

_LIMIT = 256
_HARD_LIMIT = 65_536  # for code on the event loop, which cannot be made to wait unless it awaits its sends


class Events:
    """A bounded queue that ends: by `end`, with or without an error, or because the reader has left.

    A thread that puts waits while the reader is `limit` items behind. Code on the event loop is told to wait by `room`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int = _LIMIT) -> None:
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._limit = limit
        self._items: deque[Any] = deque()  # Any: as the app gave them, or as JSON has them
        self._changed = threading.Condition()
        self._readers: set[asyncio.Future[None]] = set()  # the one that waits for an item
        self._senders: set[asyncio.Future[None]] = set()  # of the event loop, waiting for room
        self._error: BaseException | None = None
        self.num_put = 0
        self.is_ended = False
        self.is_cancelled = False
        self.has_failed = False

    @property
    def is_on_loop(self) -> bool:
        """Whether this code runs where it must not block."""
        return threading.get_ident() == self._loop_thread

    def put(self, item: object) -> None:
        """From any thread. After the end it does nothing.

        Raises: StreamCancelled if the reader has left; OutputError on the event loop for code that never awaits.
        """
        with self._changed:
            if not self.is_on_loop:
                self._changed.wait_for(self._has_room)
            elif len(self._items) >= _HARD_LIMIT:
                raise OutputError("The app sends without awaiting it, faster than anybody can read.")
            if self.is_ended:
                return
            if self.is_cancelled:
                raise StreamCancelled
            self._items.append(item)
            self.num_put += 1
        self._wake(self._readers)

    def end(self, error: BaseException | None = None) -> None:
        """From any thread. Only the first end counts."""
        with self._changed:
            if self.is_ended:
                return
            self.is_ended = True
            self.has_failed = error is not None
            self._error = error
            self._changed.notify_all()
        self._wake(self._readers)
        self._wake(self._senders)

    def cancel(self, error: BaseException | None = None) -> None:
        """The reader leaves, or is sent away with an error: nobody waits for room any more."""
        with self._changed:
            self.is_cancelled = True
            self._error = error
            self._items.clear()
            self._changed.notify_all()
        self._wake(self._readers)
        self._wake(self._senders)

    async def take(self) -> Any:  # Any: as `put`
        """The next item. For one reader, on the event loop.

        Raises: StopAsyncIteration at the end, or the error that it ended with.
        Cancellation: nothing is lost.
        """
        while True:
            with self._changed:
                if self._items:
                    if len(self._items) <= self._limit:
                        self._changed.notify()
                        self._wake(self._senders)
                    return self._items.popleft()
                if self.is_ended or self.is_cancelled:
                    error, self._error = self._error, None
                    raise error or StopAsyncIteration
            await self._wait(self._readers, lambda: bool(self._items or self.is_ended or self.is_cancelled))

    async def room(self) -> None:
        """Return when another item may be put. Raises: StreamCancelled if the reader has left."""
        while not self._has_room():
            await self._wait(self._senders, self._has_room)
        if self.is_cancelled and not self.is_ended:
            raise StreamCancelled

    def _has_room(self) -> bool:
        return len(self._items) < self._limit or self.is_ended or self.is_cancelled

    async def _wait(self, waiting: set[asyncio.Future[None]], is_over: Callable[[], bool]) -> None:
        future = self._loop.create_future()
        waiting.add(future)
        try:
            if not is_over():  # a thread may have put something before it could see this future
                await future
        finally:
            waiting.discard(future)

    def _wake(self, waiting: set[asyncio.Future[None]]) -> None:
        if not waiting:
            return
        if self.is_on_loop:
            _set_all(waiting)
            return
        try:
            self._loop.call_soon_threadsafe(_set_all, waiting)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self.is_cancelled = True


def _set_all(waiting: set[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)
