"""The event loop that every process of ours runs on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

__all__ = ["first_error", "on_hangup", "run"]

_hangup_calls: list[Callable[[], None]] = []


def run(main: Coroutine[Any, Any, None]) -> None:  # Any: as in the type
    """Run to the end, on uvloop where there is one: faster, and it waits for children without a thread for each."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def first_error(error: BaseException) -> BaseException:
    """What went wrong first, out of the groups that task groups raise."""
    return first_error(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


@contextlib.contextmanager
def on_hangup(call: Callable[[], None]) -> Iterator[None]:
    """Have this called on the event loop at each SIGHUP, as long as the context lasts; there may be several. Without
    any, SIGHUP ends the process. To be entered in the main thread."""
    loop = asyncio.get_running_loop()

    def call_all() -> None:
        for each in _hangup_calls:
            each()

    def tell(*_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are leaving
            loop.call_soon_threadsafe(call_all)

    # Not the loop's own handlers: when it lets go of those, a signal kills for a moment.
    before = signal.signal(signal.SIGHUP, tell)
    _hangup_calls.append(call)
    try:
        yield
    finally:
        _hangup_calls.remove(call)
        if not _hangup_calls:
            signal.signal(signal.SIGHUP, before)
