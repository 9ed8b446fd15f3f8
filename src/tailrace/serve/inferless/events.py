"""What one call of `infer` gives, on its way from whatever thread sends it to the event loop that reads it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from tailrace.serve.inferless.errors import StreamCancelled

__all__ = ["Events", "is_on_loop"]

_LIMIT = 256
_HARD_LIMIT = 65_536  # for code on an event loop, which should wait by awaiting: blocked, it holds up its loop


class Events:
    """A bounded queue that ends: by `end`, with or without an error, or because the reader has left.

    A thread that puts waits while the reader is `limit` items behind. Code on an event loop of its own waits in `room`.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._items: deque[Any] = deque()  # Any: as the app gave them, or as JSON has them
        self._changed = threading.Condition()
        self._readers: set[asyncio.Future[None]] = set()  # the one that waits for an item
        self._senders: set[asyncio.Future[None]] = set()  # on their own loops, waiting for room
        self._error: BaseException | None = None
        self.num_put = 0
        self.is_ended = False
        self.is_cancelled = False
        self.has_failed = False

    def put(self, item: object) -> None:
        """From any thread but the reader's. After the end it does nothing. Raises: StreamCancelled if the reader has
        left."""
        limit = _HARD_LIMIT if is_on_loop() else self._limit
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(limit))
            self._append(item)

    def put_last(self, item: object) -> None:
        """As `put`, on the reader's loop: it does not wait for room."""
        with self._changed:
            self._append(item)

    def _append(self, item: object) -> None:
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
        while not self._has_room(self._limit):
            await self._wait(self._senders, lambda: self._has_room(self._limit))
        if self.is_cancelled and not self.is_ended:
            raise StreamCancelled

    def _has_room(self, limit: int) -> bool:
        return len(self._items) < limit or self.is_ended or self.is_cancelled

    async def _wait(self, waiting: set[asyncio.Future[None]], is_over: Callable[[], bool]) -> None:
        future = asyncio.get_running_loop().create_future()
        with self._changed:
            if is_over():
                return
            waiting.add(future)
        try:
            await future
        finally:
            with self._changed:
                waiting.discard(future)

    def _wake(self, waiting: set[asyncio.Future[None]]) -> None:
        with self._changed:
            futures = tuple(waiting)
            waiting.clear()
        for future in futures:
            try:
                future.get_loop().call_soon_threadsafe(_set, future)
            except RuntimeError:  # its loop is closed
                self.is_cancelled = self.is_cancelled or waiting is self._readers


def is_on_loop() -> bool:
    """Whether this code runs on an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
