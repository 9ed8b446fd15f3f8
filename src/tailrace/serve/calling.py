"""Calling what a user wrote: on the event loop where it is asynchronous, in a thread where it is not."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread
from starlette.concurrency import iterate_in_threadpool

__all__ = ["as_async_iterator", "call", "is_asynchronous", "task_in_thread"]


def is_asynchronous(function: Callable[..., Any]) -> bool:  # Any: the user's
    """Whether it has to be called on the event loop, also where a decorator stands in front of it."""
    inner = inspect.unwrap(function)
    if not inspect.isroutine(inner):
        inner = inspect.unwrap(getattr(type(inner), "__call__", inner))  # noqa: B004  # what is called, not whether
    return inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)


async def call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    limiter: anyio.CapacityLimiter | None = None,
) -> Any:  # Any: what the user's function takes and gives
    """What it returns. A generator, asynchronous or not, is given back as it is, to be iterated."""
    if is_asynchronous(function) or inspect.isgeneratorfunction(inspect.unwrap(function)):
        result = function(*args, **kwargs)
    else:
        result = await anyio.to_thread.run_sync(lambda: function(*args, **kwargs), limiter=limiter)
    return await result if inspect.isawaitable(result) else result


def as_async_iterator(result: Any) -> AsyncIterator[Any] | None:  # Any: the user's
    """What a generator gives, for the event loop; None for what is none."""
    if hasattr(result, "__aiter__"):
        return result.__aiter__()  # type: ignore[no-any-return]
    if inspect.isgenerator(result):
        return iterate_in_threadpool(result).__aiter__()
    return None


def task_in_thread(task: asyncio.Task[Any]) -> asyncio.Future[Any] | None:
    """What a task waits for, where that is a function in one of anyio's threads, as routes without `async` are run.

    Cancelling such a task natively would let it go, and its place with it, while the thread works on: neither anyio nor
    asyncio has a word for this, so the task is looked into.
    """
    awaited: Any = task.get_coro()
    while awaited is not None:
        code = getattr(awaited, "cr_code", None)
        if code is not None and code.co_name == "run_sync_in_worker_thread":
            return getattr(task, "_fut_waiter", None)
        awaited = getattr(awaited, "cr_await", None)
    return None
