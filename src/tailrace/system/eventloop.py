"""The event loop of all processes, and SIGHUP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

__all__ = ["first_error", "on_hangup", "outlive_hangup", "run"]

_T = TypeVar("_T")
_Handler = Callable[[int, FrameType | None], Any] | int | None  # Any: as in signal


@dataclass(slots=True)
class _Hangups:
    """What happens at SIGHUP: each function tells a context. Outside of all contexts, it is what was `before`."""

    calls: list[Callable[[], None]] = field(default_factory=list)
    before: _Handler = None
    has_missed: bool = False  # one came before the first context

    def tell(self, *_: object) -> None:
        self.has_missed = not self.calls
        for call in list(self.calls):
            call()


_hangups = _Hangups()


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
    has none open. The next context hears of it. In a terminal, it means that the terminal is gone."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            signal.signal(signal.SIGHUP, _hangups.tell)  # processes that it starts do not inherit a function


@contextlib.contextmanager
def on_hangup(call: Callable[[], None]) -> Iterator[None]:
    """Call a function on the event loop at each SIGHUP, within the context. Several contexts may be open, and are left
    in any order; outside of them SIGHUP does what it did before. Enter it in the main thread."""
    loop = asyncio.get_running_loop()

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process exits already
            loop.call_soon_threadsafe(call)

    # asyncio restores the default handlers when its loop closes; a signal would then kill the process.
    if not _hangups.calls:
        _hangups.before = signal.getsignal(signal.SIGHUP)
    _hangups.calls.append(tell)
    signal.signal(signal.SIGHUP, _hangups.tell)
    if _hangups.has_missed:
        _hangups.tell()
    try:
        yield
    finally:
        _hangups.calls.remove(tell)
        if not _hangups.calls:
            signal.signal(signal.SIGHUP, _hangups.before)
