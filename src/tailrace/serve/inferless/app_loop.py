"""A thread with an event loop for an app's coroutines, so that one which blocks holds up nobody but its own app."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["AppLoop", "until_done"]

_Outcome: TypeAlias = tuple[Any, BaseException | None]  # Any: what the app's code gives


class AppLoop:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._turn, name=name, daemon=True).start()

    async def run(self, call: Callable[[], Any]) -> Any:  # Any: what the app's code gives
        """Make `call` on the app's loop, await what it gives if that is to be awaited, and return the result.

        Raises: whatever it raises.
        Cancellation: cancels what runs on the app's loop, and waits until that has ended.
        """
        job = _Job(call, self._loop)
        self._loop.call_soon_threadsafe(job.begin)
        await until_done(job.outcome, job.cancel)
        result, error = job.outcome.result()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Have the thread end when what it does now is done."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _turn(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class _Job:
    """One call, on its way between two event loops."""

    def __init__(self, call: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._context = contextvars.copy_context()
        self._loop = loop
        self._caller_loop = asyncio.get_running_loop()
        self._task: asyncio.Task[_Outcome] | None = None
        self.outcome: asyncio.Future[_Outcome] = self._caller_loop.create_future()

    def begin(self) -> None:
        self._task = self._loop.create_task(self._run(), context=self._context)
        self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        """From the caller's loop."""
        self._loop.call_soon_threadsafe(lambda: self._task is not None and self._task.cancel())

    async def _run(self) -> _Outcome:
        try:
            result = self._call()
            return (await result if inspect.isawaitable(result) else result), None
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit too, which would end the loop: the caller decides what it means
            return None, error

    def _done(self, task: asyncio.Task[_Outcome]) -> None:
        outcome: _Outcome = (None, asyncio.CancelledError()) if task.cancelled() else task.result()
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits any more
            self._caller_loop.call_soon_threadsafe(self._tell, outcome)

    def _tell(self, outcome: _Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


async def until_done(future: asyncio.Future[Any], on_cancel: Callable[[], None] = lambda: None) -> None:
    """Wait for a future, also when cancelled: then `on_cancel` is called, and the wait goes on to its end.

    Raises: CancelledError at the end if it was cancelled meanwhile.
    """
    is_cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            is_cancelled = True
            on_cancel()
    if is_cancelled:
        raise asyncio.CancelledError
