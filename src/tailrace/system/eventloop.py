"""The event loop of all processes, and SIGHUP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

__all__ = ["first_error", "on_hangup", "outlive_hangup", "run"]

_T = TypeVar("_T")
_hangup_calls: list[Callable[[], None]] = []


def run(main: Coroutine[Any, Any, _T]) -> _T:  # Any: as in the type
    """Run a coroutine to its end. Uses uvloop if it is installed: it is faster, and waits for child processes without
    threads."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def first_error(error: BaseException) -> BaseException:
    """Return the first error in the nested exception groups of task groups."""
    return first_error(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def outlive_hangup() -> None:
    """Let SIGHUP not end a process without a terminal: there it asks a service to open its files again, also one that
    has none open. In a terminal, it means that the terminal is gone."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            signal.signal(signal.SIGHUP, lambda *_: None)  # processes that it starts do not inherit a function


@contextlib.contextmanager
def on_hangup(call: Callable[[], None]) -> Iterator[None]:
    """Call a function on the event loop at each SIGHUP, within the context. Several contexts may be open; outside of
    them SIGHUP does what it did before. Enter it in the main thread."""
    loop = asyncio.get_running_loop()

    def call_all() -> None:
        for each in _hangup_calls:
            each()

    def tell(*_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process exits already
            loop.call_soon_threadsafe(call_all)

    # asyncio restores the default handlers when its loop closes; a signal would then kill the process.
    before = signal.signal(signal.SIGHUP, tell)
    _hangup_calls.append(call)
    try:
        yield
    finally:
        _hangup_calls.remove(call)
        if not _hangup_calls:
            signal.signal(signal.SIGHUP, before)
