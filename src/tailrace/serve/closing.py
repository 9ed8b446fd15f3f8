"""Closes the generators of a request that its client has left, or that has failed.

Frameworks leave generators behind: Starlette does not close the body of a `StreamingResponse` whose client has left,
and `async for` does not close what it breaks off. Such a generator ends when the garbage collector finds it, which may
take minutes, and until then it keeps its place in a batch. So each request, and each run of a batched function, has a
`Scope` that knows the generators which were begun in it, and closes those that are left when it is cut short.

One that ends well closes nothing: what it leaves may be meant for the next request. For the same reason a generator
behind an `asynccontextmanager` is left alone. Its end is the manager's `__aexit__`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from types import AsyncGeneratorType, GeneratorType
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import anyio.to_thread
from starlette.concurrency import iterate_in_threadpool

from tailrace.serve.failures import failed

__all__ = ["Scope", "close_if_left", "closing_generators"]

# What generators take and give is the user's own: hence every Any in this module.


class _Closable(Protocol):
    async def aclose(self) -> None: ...


_Begun: TypeAlias = "_Closable | GeneratorType[Any, Any, Any]"
_current: ContextVar[Scope | None] = ContextVar("tailrace_scope", default=None)
_in_thread = iterate_in_threadpool.__code__
_enters_context = contextlib._AsyncGeneratorContextManager.__aenter__.__code__


class Scope:
    """The generators that a request has begun. It keeps none of them alive. Calls may come from any thread."""

    def __init__(self) -> None:
        self._begun: WeakKeyDictionary[_Begun, asyncio.Task[Any] | None] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def enter(self) -> None:
        """Generators that this task, and the tasks that it starts, begin from here on belong to the scope."""
        _current.set(self)

    def add(self, begun: _Begun) -> None:
        with self._lock:
            self._begun[begun] = _task()

    async def close(self) -> None:
        """Close what is left, in the order in which it was begun: an outer generator before the inner ones.

        What a task has begun that still runs is closed when that task ends. An exception that a generator raises on
        being closed is printed. Cancellation: the rest is closed first.
        """
        with self._lock:
            left, self._begun = list(self._begun.items()), WeakKeyDictionary()
        cancelled: asyncio.CancelledError | None = None
        for begun, task in left:
            if task is not None and not task.done() and task is not asyncio.current_task():
                task.add_done_callback(_closes(begun))
                continue
            try:
                await _close(begun)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled


def close_if_left(begun: _Closable) -> None:
    """Have `begun` closed if the current request is cut short. Does nothing outside of a request."""
    scope = _current.get()
    if scope is not None:
        scope.add(begun)


@contextlib.contextmanager
def closing_generators() -> Iterator[None]:
    """While it lasts, each async generator that begins on this thread's event loop is added to its scope."""
    before = sys.get_asyncgen_hooks()

    def begins(generator: AsyncGenerator[Any, Any]) -> None:
        if before.firstiter is not None:
            before.firstiter(generator)
        scope = _current.get()
        if scope is not None and sys._getframe(1).f_code is not _enters_context:
            scope.add(generator)
            behind = _plain_generator(generator)
            if behind is not None:
                scope.add(behind)

    sys.set_asyncgen_hooks(firstiter=begins)
    try:
        yield
    finally:
        sys.set_asyncgen_hooks(firstiter=before.firstiter)


def _plain_generator(generator: AsyncGenerator[Any, Any]) -> GeneratorType[Any, Any, Any] | None:
    """The plain generator that Starlette iterates in threads. Python has no hook for these."""
    if not isinstance(generator, AsyncGeneratorType) or generator.ag_code is not _in_thread:
        return None
    iterator = generator.ag_frame.f_locals.get("iterator") if generator.ag_frame is not None else None
    return iterator if isinstance(iterator, GeneratorType) else None


def _task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs on this thread
        return None


def _closes(begun: _Begun) -> Callable[[object], None]:
    def close(_: object) -> None:
        closing = asyncio.get_running_loop().create_task(_close(begun))
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)

    return close


_closing: set[asyncio.Task[None]] = set()  # else nobody would hold them


async def _close(begun: _Begun) -> None:
    try:
        if isinstance(begun, GeneratorType):
            if begun.gi_frame is not None:
                await anyio.to_thread.run_sync(begun.close)  # its own cleaning up may block
        else:
            closed: Awaitable[None] = begun.aclose()
            await closed
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except RuntimeError as error:
        if "already running" not in str(error):  # else another task iterates it, and will end it
            _tell(error)
    except BaseException as error:  # user code may raise anything
        _tell(error)


def _tell(error: BaseException) -> None:
    told = failed(error, "closing a generator")
    sys.stderr.write(f"{told.message}\n{told.traceback}")
