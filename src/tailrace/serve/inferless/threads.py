"""Which threads a call of an app's `infer` has started.

Apps let a library generate in a thread of its own, and take its words from a queue. Two things follow: if that thread
dies, the app may wait for ever; and what it has put into the queue has to be taken out again, even when nobody wants
it, or the next call finds it there. Nothing but the threads' start tells whose they are, so it is looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from tailrace.serve.inferless.errors import StreamCancelled

__all__ = ["Threads", "unwatch", "watch"]

_MARK = "_tailrace_call"

_call: ContextVar[Threads | None] = ContextVar("tailrace_inferless_call", default=None)
_start = threading.Thread.start
_previous_hook: Callable[[threading.ExceptHookArgs], Any] = threading.excepthook  # Any: whatever a hook returns
_num_watching = 0


class Threads:
    """Of one call, threads started by its threads included."""

    def __init__(self) -> None:
        self._started: list[threading.Thread] = []
        self.on_death: Callable[[BaseException], None] | None = None  # called in the thread that dies

    def begin(self) -> None:
        """What this context starts from now on belongs to the call."""
        _call.set(self)

    def others(self, *, alive: bool = False) -> bool:
        """Whether there are, or have been, any beside the one that asks."""
        current = threading.current_thread()
        return any(thread is not current and (not alive or thread.is_alive()) for thread in tuple(self._started))

    def add(self, thread: threading.Thread) -> None:
        setattr(thread, _MARK, self)
        self._started.append(thread)


def watch() -> None:
    """Look at threads that start and die, until `unwatch` has been called as often."""
    global _num_watching, _previous_hook
    _num_watching += 1
    if _num_watching == 1:
        _previous_hook = threading.excepthook
        threading.excepthook = _on_death
        threading.Thread.start = _noted  # type: ignore[method-assign]


def unwatch() -> None:
    global _num_watching
    _num_watching -= 1
    if _num_watching == 0:
        if threading.excepthook is _on_death:
            threading.excepthook = _previous_hook
        if threading.Thread.start is _noted:
            threading.Thread.start = _start  # type: ignore[method-assign]


def _noted(self: threading.Thread) -> None:
    call: Threads | None = _call.get() or getattr(threading.current_thread(), _MARK, None)
    if call is not None and not self.name.startswith("asyncio_"):  # what `to_thread` uses is anybody's
        call.add(self)
    _start(self)


def _on_death(args: threading.ExceptHookArgs) -> None:
    call: Threads | None = getattr(args.thread, _MARK, None)
    if issubclass(args.exc_type, StreamCancelled):
        return
    if call is None or call.on_death is None or args.exc_value is None:
        _previous_hook(args)
    else:
        call.on_death(args.exc_value)
