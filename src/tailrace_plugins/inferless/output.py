"""Passes the output of one call of `infer` from any thread to the event loop that reads it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from tailrace_plugins.inferless.inferless_errors import InferFailed, OutputError, StreamCancelled
from tailrace_plugins.inferless.inferless_wire import values_of
from tailrace_plugins.inferless.leftovers import Threads

__all__ = ["Events", "StreamOutputHandler"]

logger = logging.getLogger("tailrace.serve")

_LIMIT = 256
_HARD_LIMIT = 8_192  # for code on an event loop that does not await its sends: blocking would stop the loop
_MAX_UNREAD_SENDS = 4096  # sends without a reader before the app's threads get StreamCancelled


class Events:
    """A bounded queue with an end: `end`, with or without an error, or the reader has left.

    `put` blocks a thread while the reader is `limit` items behind. Code on an event loop awaits `room` instead.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._items: deque[Any] = deque()  # Any: the app's outputs, or JSON
        self._changed = threading.Condition()
        self._readers: set[asyncio.Future[None]] = set()  # at most one, waiting for an item
        self._senders: set[asyncio.Future[None]] = set()  # on their own loops, waiting for room
        self._error: BaseException | None = None
        self.num_put = 0
        self.is_ended = False
        self.is_cancelled = False
        self.has_failed = False

    def put(self, item: object) -> None:
        """Add an item, from any thread except the reader's. Does nothing after the end. Raises: StreamCancelled if the
        reader has left."""
        limit = _HARD_LIMIT if _is_on_loop() else self._limit
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(limit))
            self._append(item)

    def put_last(self, item: object) -> None:
        """Like `put`, but for the reader's loop: does not wait for room."""
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
        """End the queue, from any thread. Only the first end counts."""
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
        """Cancel the queue because the reader leaves, or gets `error`. Drops the items and wakes all senders."""
        with self._changed:
            self.is_cancelled = True
            self._error = error
            self._items.clear()
            self._changed.notify_all()
        self._wake(self._readers)
        self._wake(self._senders)

    async def take(self) -> Any:  # Any: as `put`
        """Return the next item. For one reader, on the event loop.

        Raises: StopAsyncIteration at the end, or the error that it ended with.
        Cancellation: no item is lost.
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
        """Wait for room for another item. Raises: StreamCancelled if the reader has left."""
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


class StreamOutputHandler:
    """Sends events to the client. Its methods can be called from any thread, and awaited in async code.

    When the reader has left, `cancelled` is true, and the next send raises StreamCancelled, a BaseException that ends a
    sending loop. If `infer` has started a thread, the first 4096 sends without a reader are discarded instead: the app
    has to consume the thread's output, or the next request would get it. Check `cancelled` to stop sooner.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._warned: set[str] = set()
        self._kinds: dict[str, str] | None = None
        self._num_discarded = 0
        self.is_finalised = False
        self.threads = Threads()

    @property
    def cancelled(self) -> bool:
        """Whether the stream has no reader any more."""
        return self._events.is_cancelled or self._events.has_failed

    def send_streamed_output(self, output: Any) -> Awaitable[None]:  # Any: a dict, checked here
        """Send one event. Waits while the reader is far behind: in a thread by blocking, in async code when awaited.

        Raises: StreamCancelled; OutputError that names an output which cannot be JSON, which also ends the stream.
        """
        if self._is_discarded():
            return _DONE
        try:
            values = values_of(output)
            self._compare(values)
            self._events.put(values)
        except OutputError as error:
            self._events.end(error)
            raise
        except StreamCancelled:
            if not self._is_discarded():
                raise
            return _DONE
        return _Room(self._events) if _is_on_loop() else _DONE

    def finalise_streamed_output(self) -> Awaitable[None]:
        """End the stream. `infer` may go on; its further events are ignored."""
        if self.is_finalised:
            self.warn("the app finalises a stream twice")
        self.is_finalised = True
        self._events.end()
        return _DONE

    def fail(self, message: str) -> Awaitable[None]:
        """End the stream with an error message for the client. An extension of the vendor's API."""
        self._events.end(InferFailed(str(message)))
        return _DONE

    def warn(self, what: str) -> None:
        """Log a warning, once per stream."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning(what)

    def _is_discarded(self) -> bool:
        """Return whether to discard a send. Raises: StreamCancelled if the app should stop sending."""
        if self._events.is_ended and not self._events.has_failed:
            self.warn("the app sends events after the end of the stream: they are ignored")
            return True
        if not self.cancelled:
            return False
        self._num_discarded += 1
        if self._num_discarded > _MAX_UNREAD_SENDS or not self.threads.others():
            raise StreamCancelled
        return True

    def _compare(self, values: dict[str, Any]) -> None:  # Any: what JSON holds
        kinds = {name: type(value).__name__ for name, value in values.items()}
        if self._kinds is None:
            self._kinds = kinds
        elif kinds != self._kinds:
            self.warn("the outputs' names or types change between the events of a stream; clients may not expect it")


class _Room:
    """Awaitable until another event may be sent, or at once without `events`. Awaiting is optional."""

    def __init__(self, events: Events | None) -> None:
        self._events = events

    def __await__(self) -> Generator[Any, None, None]:  # Any: as in Awaitable
        if self._events is not None:
            yield from self._events.room().__await__()


_DONE = _Room(None)


def _is_on_loop() -> bool:
    """Return whether this code runs on an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
