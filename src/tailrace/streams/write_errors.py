"""Whether a store can be written at the moment, and how long it could not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

from tailrace.errors import StorageError

__all__ = ["WriteErrors"]

logger = logging.getLogger("tailrace.journal")

_QUIET_S = 0.5  # shorter write errors are not logged


class WriteErrors:
    """The write error of a store, if there is one. `name` of the store is for the log.

    A store that cannot write for `give_up_after_s` gives up: `is_too_long` returns True once. The store drops what
    waits to be written, and calls the functions in `on_give_up`, which must end all streams that the server has leases
    of.
    """

    def __init__(self, name: str, *, give_up_after_s: float) -> None:
        self.current: StorageError | None = None
        self.has_given_up = False
        self.on_give_up: list[Callable[[StorageError], None]] = []
        self._name = name
        self._give_up_after_s = give_up_after_s
        self._failing_since_s = 0.0
        self._writable_since_s = -_QUIET_S
        self._is_logged = False
        self._settled = asyncio.Event()  # set when the write error is over or the store has given up
        self._on_failure: list[Callable[[], None]] = []

    def check(self) -> None:
        """Raises: StorageError if nothing can be written at the moment."""
        if self.current is not None:
            raise self.current.with_traceback(None)

    def give_up(self, error: StorageError) -> None:
        """End all streams."""
        for fail_all in self.on_give_up:
            fail_all(error)

    def failed(self, error: StorageError) -> bool:
        """A write failed. Returns whether the one before worked."""
        is_first = self.current is None
        if is_first:
            self._settled.clear()
            now_s = asyncio.get_running_loop().time()
            if now_s - self._writable_since_s > _QUIET_S:  # otherwise it is the same write error
                self._failing_since_s = now_s
        self.current = error
        for on_failure in self._on_failure:
            on_failure()
        return is_first

    @contextlib.contextmanager
    def calling(self, on_failure: Callable[[], None]) -> Iterator[None]:
        """Call a function after each write that fails, until the context is left."""
        self._on_failure.append(on_failure)
        try:
            yield
        finally:
            self._on_failure.remove(on_failure)

    def recovered(self) -> None:
        """A write worked again."""
        self._writable_since_s = asyncio.get_running_loop().time()
        if self._is_logged:
            logger.warning("%s can be written again.", self._name)
        self.current = None
        self.has_given_up = self._is_logged = False
        self._settled.set()

    def is_too_long(self) -> bool:
        """Return whether the store has to give up now. Logs a write error that lasts."""
        if self.current is None:
            return False
        waited_s = asyncio.get_running_loop().time() - self._failing_since_s
        if not self._is_logged and waited_s > _QUIET_S:
            self._is_logged = True
            logger.error("%s Streams are paused.", self.current.message)
        if self.has_given_up or waited_s < self._give_up_after_s:
            return False
        self.has_given_up = True
        self._settled.set()
        return True

    async def wait(self) -> None:
        """Return when there is no write error. Raises: StorageError if it lasts too long."""
        while self.current is not None:
            if self.has_given_up:
                self.check()
            await self._settled.wait()
