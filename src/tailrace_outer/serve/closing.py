"""Closes the generators of a request that has failed or whose client has left.

Frameworks leave generators open: Starlette does not close the body of a `StreamingResponse` whose client has left, and
`async for` does not close its iterator after a `break`. The garbage collector may take minutes to close such a
generator, and until then it keeps its position in a batch. So each request, and each run of a batched function, has a
`Scope`. It tracks the generators that begin in it, and closes the remaining ones when it is aborted.

A scope that ends normally closes nothing, because a remaining generator may be meant for the next request. For the same
reason, generators of an `asynccontextmanager` are not tracked. They end in the manager's `__aexit__`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from types import GeneratorType
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import anyio.to_thread

from tailrace_outer.serve.failures import failed
from tailrace_outer.serve.starlette_names import plain_generator

__all__ = ["Scope", "close_on_abort", "closing_generators"]

# Every Any in this module is an item of a user's generator.


class _Closable(Protocol):
    async def aclose(self) -> None: ...


_Begun: TypeAlias = "_Closable | GeneratorType[Any, Any, Any]"
_current: ContextVar[Scope | None] = ContextVar("tailrace_scope", default=None)


@contextlib.asynccontextmanager
async def _context() -> AsyncIterator[None]:
    yield


_enters_context = type(_context()).__aenter__.__code__


class Scope:
    """Tracks the generators that a request has begun, by weak references. May be called from any thread."""

    def __init__(self) -> None:
        self._begun: WeakKeyDictionary[_Begun, asyncio.Task[Any] | None] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def enter(self) -> None:
        """Make this the scope of the current task, and of tasks that it starts."""
        _current.set(self)

    def add(self, begun: _Begun) -> None:
        with self._lock:
            self._begun[begun] = _task()

    async def close(self) -> None:
        """Close the remaining generators in the order of their start, so that outer ones come before inner ones.

        A generator whose task still runs is closed when that task ends. Exceptions of closing generators are printed.
        Cancellation: raised after all generators are closed.
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


def close_on_abort(begun: _Closable) -> None:
    """Close `begun` if the current request is aborted. Does nothing outside of a request."""
    scope = _current.get()
    if scope is not None:
        scope.add(begun)


@contextlib.contextmanager
def closing_generators() -> Iterator[None]:
    """Add each async generator that begins on this thread's event loop to its scope."""
    before = sys.get_asyncgen_hooks()

    def begins(generator: AsyncGenerator[Any, Any]) -> None:
        if before.firstiter is not None:
            before.firstiter(generator)
        scope = _current.get()
        if scope is not None and sys._getframe(1).f_code is not _enters_context:
            scope.add(generator)
            plain = plain_generator(generator)
            if plain is not None:
                scope.add(plain)

    sys.set_asyncgen_hooks(firstiter=begins)
    try:
        yield
    finally:
        sys.set_asyncgen_hooks(firstiter=before.firstiter)


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


_closing: set[asyncio.Task[None]] = set()  # the event loop holds only weak references to tasks


async def _close(begun: _Begun) -> None:
    try:
        if isinstance(begun, GeneratorType):
            if begun.gi_frame is not None:
                await anyio.to_thread.run_sync(begun.close)  # its cleanup may block
        else:
            closed: Awaitable[None] = begun.aclose()
            await closed
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except RuntimeError as error:
        if "already running" not in str(error):  # otherwise another task iterates it, and will end it
            _report(error)
    except BaseException as error:  # user code may raise anything
        _report(error)


def _report(error: BaseException) -> None:
    failure = failed(error, "closing a generator")
    sys.stderr.write(f"{failure.message}\n{failure.traceback}")
