"""What one call of `infer` gives, on its way from whatever thread sends it to the event loop that reads it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from tailrace.serve.inferless.errors import InferFailed, OutputError, StreamCancelled
from tailrace.serve.inferless.leftovers import Threads
from tailrace.serve.inferless.wire import values_of

__all__ = ["Events", "StreamOutputHandler"]

logger = logging.getLogger("tailrace.serve")

_LIMIT = 256
_HARD_LIMIT = 8_192  # for code on an event loop, which should wait by awaiting: blocked, it holds up its loop
_MAX_IN_VAIN = 4096  # sends that nobody reads, for the sake of an app's own threads


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
        limit = _HARD_LIMIT if _is_on_loop() else self._limit
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


class StreamOutputHandler:
    """Sends events to whoever asked. Its methods can be called from any thread, and awaited in async code.

    Once nobody reads any more, `cancelled` is true, and the next send raises StreamCancelled, a BaseException, so that
    a loop that sends comes to its end. Where `infer` has started a thread, that is put off for some thousand sends:
    what such a thread makes must be taken, or the next request would find it. To stop sooner, look at `cancelled`.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._warned: set[str] = set()
        self._kinds: dict[str, str] | None = None
        self._num_in_vain = 0
        self.is_finalised = False
        self.threads = Threads()

    @property
    def cancelled(self) -> bool:
        """Nobody will read what is sent."""
        return self._events.is_cancelled or self._events.has_failed

    def send_streamed_output(self, output: Any) -> Awaitable[None]:  # Any: a dict, which is looked at here
        """Send one event. In a thread this waits while the reader is far behind; in async code, awaiting it does.

        Raises: StreamCancelled; OutputError that names an output which JSON cannot hold, and the stream has failed.
        """
        if self._is_in_vain():
            return _DONE
        try:
            values = values_of(output)
            self._compare(values)
            self._events.put(values)
        except OutputError as error:
            self._events.end(error)
            raise
        except StreamCancelled:
            if not self._is_in_vain():
                raise
            return _DONE
        return _Room(self._events) if _is_on_loop() else _DONE

    def finalise_streamed_output(self) -> Awaitable[None]:
        """End the stream. `infer` may go on; what it sends is ignored."""
        if self.is_finalised:
            self.warn("the app finalises a stream twice")
        self.is_finalised = True
        self._events.end()
        return _DONE

    def fail(self, message: str) -> Awaitable[None]:
        """End the stream with an error that says `message` to the client. The vendor has nothing like it."""
        self._events.end(InferFailed(str(message)))
        return _DONE

    def warn(self, what: str) -> None:
        """Say it in the log, once a stream."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning(what)

    def _is_in_vain(self) -> bool:
        """Whether a send has nothing to do. Raises: StreamCancelled if there should be no more of them."""
        if self._events.is_ended and not self._events.has_failed:
            self.warn("the app sends after the end of the stream, which is ignored")
            return True
        if not self.cancelled:
            return False
        self._num_in_vain += 1
        if self._num_in_vain > _MAX_IN_VAIN or not self.threads.others():
            raise StreamCancelled
        return True

    def _compare(self, values: dict[str, Any]) -> None:  # Any: what JSON holds
        kinds = {name: type(value).__name__ for name, value in values.items()}
        if self._kinds is None:
            self._kinds = kinds
        elif kinds != self._kinds:
            self.warn("the outputs' names or types change between the events of a stream; clients may not expect it")


class _Room:
    """To be awaited, or not: until another event may be sent; at once, where there is nothing to wait for."""

    def __init__(self, events: Events | None) -> None:
        self._events = events

    def __await__(self) -> Generator[Any, None, None]:  # Any: as in Awaitable
        if self._events is not None:
            yield from self._events.room().__await__()


_DONE = _Room(None)


def _is_on_loop() -> bool:
    """Whether this code runs on an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
