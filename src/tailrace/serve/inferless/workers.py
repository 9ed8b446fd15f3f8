"""Threads for an app's code: as many as it may run at once, and its own, from `initialize` to `finalize`.

With one, all that an app does happens in one thread, as at the vendor: what libraries keep for a thread stays true.
They are daemons, since code that never comes back must not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar, cast

__all__ = ["Workers"]

T = TypeVar("T")


class _Job:
    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.context = contextvars.copy_context()
        self.loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[tuple[object, BaseException | None]] = self.loop.create_future()

    def run(self) -> None:
        try:
            outcome: tuple[object, BaseException | None] = self.context.run(self.call), None
        except BaseException as error:  # the app's own, SystemExit too: whoever waits decides what that means
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._set, outcome)

    def _set(self, outcome: tuple[object, BaseException | None]) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class Workers:
    def __init__(self, count: int, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # bounded by who calls: `count` at a time
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, call: Callable[[], T]) -> T:
        """The result of `call`, made in one of the threads. Raises: whatever it raises.

        Cancellation: the call goes on; its result is lost.
        """
        job = _Job(call)
        self._jobs.put(job)
        result, error = await job.outcome
        if error is not None:
            raise error
        return cast(T, result)

    def close(self) -> None:
        """Have the threads end, each when what it does now is done."""
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # so that a request's values do not stay until the next one
