"""Threads for database calls that may never return."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tailrace.errors import StorageError

__all__ = ["TOO_SLOW", "UNREACHABLE", "DatabaseThreads"]

UNREACHABLE = "The database cannot be reached. Try again later."
TOO_SLOW = "The database did not answer in time. Try again later."

_Result = TypeVar("_Result")
_Call = tuple[Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]]  # Any: of each call

MAX_WAITING = 200  # calls without a thread


class DatabaseThreads:
    """Runs calls in daemon threads. The event loop's own threads tokenize prompts, and the process waits for them at
    exit; a database that hangs must not block either.

    Calls on PostgreSQL end within seconds even if it hangs, so its threads become free again.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._threads: list[threading.Thread] = []
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()

    async def run(self, call: Callable[[], _Result], *, within_s: float | None = 15.0) -> _Result:
        """Run a call and return its result. `within_s` is a timeout; None waits without a limit.

        Cancellation: a call that has begun continues, and its result is dropped. Raises: what the call raises;
        StorageError on a timeout, or if too many calls wait for a thread.
        """
        if self._calls.qsize() >= MAX_WAITING:
            raise StorageError("The database has too many calls waiting. Try again later.")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = loop.create_future()
        self._calls.put((call, loop, future))
        if len(self._threads) < self._number:
            thread = threading.Thread(target=self._work, name="database", daemon=True)
            self._threads.append(thread)
            thread.start()
        try:
            async with asyncio.timeout(within_s):
                return await future
        except TimeoutError:
            raise StorageError(TOO_SLOW) from None

    def _work(self) -> None:
        while True:
            call, loop, future = self._calls.get()
            if future.cancelled():
                continue
            try:
                result, error = call(), None
            except BaseException as raised:  # raised again in the caller
                result, error = None, raised
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(_settle, future, result, error)
            del call, future, result, error


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:  # Any: as above
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
