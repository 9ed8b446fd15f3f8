"""Runs an app's code in separate threads, or on a separate event loop if it is async.

With one thread, all of the app's code runs in the same thread, as at the vendor, so that thread-local state of
libraries works. A blocking coroutine delays only its own app. All threads are daemons, because code that never returns
must not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeAlias

__all__ = ["AppLoop", "Workers", "until_done"]

# A result or an exception. Not passed as a future's exception, because futures reject StopIteration, and SystemExit
# would end the event loop.
_Outcome: TypeAlias = tuple[Any, BaseException | None]  # Any: what the app's code gives


class Workers:
    """Threads for an app's functions, one for each concurrent call."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = (
            SimpleQueue()
        )  # bounded: callers run at most `count` at a time
        self._count = count
        for number in range(count):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    async def run(self, call: Callable[[], Any]) -> Any:  # Any: what the app's code gives
        """Run `call` in one of the threads; returns its result. Raises: its exceptions.

        Cancellation: the call goes on; its result is lost.
        """
        context = contextvars.copy_context()
        outcome: Future[_Outcome] = Future()
        self._jobs.put(lambda: outcome.set_result(context.run(_outcome_of, call)))
        return _result_of(await asyncio.shield(asyncio.wrap_future(outcome)))

    def close(self) -> None:
        """End each thread after its current call."""
        for _ in range(self._count):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # frees the request's values before the next job


class AppLoop:
    """A thread with an event loop for an app's coroutines."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._turn, name=name, daemon=True).start()

    async def run(self, call: Callable[[], Any]) -> Any:  # Any: what the app's code gives
        """Run `call` on the app's loop, and await its result if it is awaitable.

        Raises: its exceptions.
        Cancellation: cancels the task on the app's loop, and waits for its end.
        """
        outcome: Future[_Outcome] = Future()
        task: asyncio.Task[_Outcome] | None = None

        def begin() -> None:
            nonlocal task
            task = self._loop.create_task(_awaited_outcome_of(call))
            task.add_done_callback(end)

        def end(task: asyncio.Task[_Outcome]) -> None:
            outcome.set_result((None, asyncio.CancelledError()) if task.cancelled() else task.result())

        def cancel() -> None:
            self._loop.call_soon_threadsafe(lambda: task is not None and task.cancel())

        self._loop.call_soon_threadsafe(begin)  # in a copy of the caller's context
        ended = asyncio.wrap_future(outcome)
        await until_done(ended, cancel)
        return _result_of(ended.result())

    def close(self) -> None:
        """End the thread after its current step."""
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


def _outcome_of(call: Callable[[], Any]) -> _Outcome:
    try:
        return call(), None
    except BaseException as error:
        return None, error


async def _awaited_outcome_of(call: Callable[[], Any]) -> _Outcome:
    try:
        result = call()
        return (await result if inspect.isawaitable(result) else result), None
    except BaseException as error:
        return None, error


def _result_of(outcome: _Outcome) -> Any:
    result, error = outcome
    if error is not None:
        raise error
    return result


async def until_done(future: asyncio.Future[Any], on_cancel: Callable[[], None] = lambda: None) -> None:
    """Wait until a future is done, even if cancelled meanwhile: then `on_cancel` is called, and the wait goes on.

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
