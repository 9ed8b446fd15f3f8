"""The `stream_output_handler` that an app's `infer` gets."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Generator
from typing import Any

from tailrace.serve.inferless.errors import AppFailed, OutputError, StreamCancelled
from tailrace.serve.inferless.events import Events, is_on_loop
from tailrace.serve.inferless.threads import Threads
from tailrace.serve.inferless.wire import values_of

__all__ = ["StreamOutputHandler"]

logger = logging.getLogger("tailrace.serve")

_MAX_IN_VAIN = 4096  # sends that nobody reads, for the sake of an app's own threads


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
        return _Room(self._events) if is_on_loop() else _DONE

    def finalise_streamed_output(self) -> Awaitable[None]:
        """End the stream. `infer` may go on; what it sends is ignored."""
        if self.is_finalised:
            self.warn("the app finalises a stream twice")
        self.is_finalised = True
        self._events.end()
        return _DONE

    def fail(self, message: str) -> Awaitable[None]:
        """End the stream with an error that says `message` to the client. The vendor has nothing like it."""
        self._events.end(AppFailed(str(message)))
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


class _Done:
    """To be awaited, or not: what it stands for has happened."""

    def __await__(self) -> Generator[Any, None, None]:  # Any: as in Awaitable
        return
        yield


class _Room:
    """To be awaited, or not: until another event may be sent."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def __await__(self) -> Generator[Any, None, None]:  # Any: as in Awaitable
        return self._events.room().__await__()


_DONE = _Done()
