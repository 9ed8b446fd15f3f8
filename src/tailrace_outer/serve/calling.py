"""Calls user code: on the event loop if it is asynchronous, else in a thread."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread
from starlette.concurrency import iterate_in_threadpool

__all__ = ["as_async_iterator", "call", "is_asynchronous"]


def is_asynchronous(function: Callable[..., Any]) -> bool:  # Any: the user's
    """Return whether a function has to be called on the event loop. Looks through decorators."""
    inner = inspect.unwrap(function)
    if not inspect.isroutine(inner):
        inner = inspect.unwrap(getattr(type(inner), "__call__", inner))  # noqa: B004  # needs the method itself, not whether it exists
    return inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)


async def call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    limiter: anyio.CapacityLimiter | None = None,
) -> Any:  # Any: what the user's function takes and gives
    """Call a function; returns its result. A generator, asynchronous or not, is returned unstarted."""
    if is_asynchronous(function) or inspect.isgeneratorfunction(inspect.unwrap(function)):
        result = function(*args, **kwargs)
    else:
        result = await anyio.to_thread.run_sync(lambda: function(*args, **kwargs), limiter=limiter)
    return await result if inspect.isawaitable(result) else result


def as_async_iterator(result: Any) -> AsyncIterator[Any] | None:  # Any: the user's
    """Return an async iterator over a generator's items, or None if `result` is not a generator."""
    if hasattr(result, "__aiter__"):
        return result.__aiter__()  # type: ignore[no-any-return]
    if inspect.isgenerator(result):
        return iterate_in_threadpool(result).__aiter__()
    return None
