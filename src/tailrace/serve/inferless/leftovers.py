"""What a call of an app's `infer` leaves behind: threads that it has started, and what is in the queues that the app
keeps from one request to the next.

Apps let a library generate in a thread of its own, and take its words from a queue; often there is one streamer, or one
queue, for all requests. Two things follow. If that thread dies, the app may wait for ever. And when `infer` fails in
between, the rest of the answer comes into the queue nevertheless, and has to be taken out again: the next caller would
get it. Nothing but the threads' start tells whose they are, so it is looked at.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

from tailrace.serve.inferless.errors import StreamCancelled

__all__ = ["Marks", "Threads", "unwatch", "watch"]

_MARK = "_tailrace_call"
_QUIET_S = 10.0  # a thread that puts nothing for so long is not waited for: it may be one that never ends
_LIMIT_S = 60.0
_LOOK_S = 0.02  # nothing says both that a thread has ended and that it has put something

_Queue: TypeAlias = "queue.Queue[Any] | queue.SimpleQueue[Any] | asyncio.Queue[Any]"  # Any: the app's

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


class Marks:
    """How full an app's queues were when a call of `infer` began: those in its instance and its module, and those in
    the objects found there, such as a streamer's."""

    def __init__(self, *holders: Mapping[str, Any]) -> None:  # Any: the app's
        self._holders = holders
        self._sizes = {id(one): one.qsize() for one in self._queues()}

    async def restore(self, threads: Threads) -> bool:
        """Take out of the queues what came since, until the call's threads have ended.

        Returns False if threads still put into them after a minute.
        """
        # One that the call has made may hold what the app means to keep, if no thread was there to fill it.
        is_new_ours = threads.others()
        sizes = [(one, self._sizes.get(id(one), 0)) for one in self._queues() if is_new_ours or id(one) in self._sizes]
        if not sizes:
            return True
        began_s = last_s = time.monotonic()
        while threads.others(alive=True):
            now_s = time.monotonic()
            if _take(sizes):
                last_s = now_s
            if now_s - last_s > _QUIET_S:
                break
            if now_s - began_s > _LIMIT_S:
                return False
            await asyncio.sleep(_LOOK_S)
        await asyncio.sleep(0)  # for what a thread has handed to this event loop
        _take(sizes)
        return True

    def _queues(self) -> Iterator[_Queue]:
        for holder in self._holders:
            yield from _queues_in(holder)


def _take(sizes: Sequence[tuple[_Queue, int]]) -> bool:
    """Take out what is beyond each size; whether there was anything."""
    has_taken = False
    for one, size in sizes:
        while one.qsize() > size:
            try:
                one.get_nowait()
            except (queue.Empty, asyncio.QueueEmpty):  # somebody else was faster
                break
            has_taken = True
    return has_taken


def _queues_in(holder: Mapping[str, Any], *, depth: int = 2) -> Iterator[_Queue]:
    for value in tuple(holder.values()):
        if isinstance(value, queue.Queue | queue.SimpleQueue | asyncio.Queue):
            yield value
        elif depth > 1 and not isinstance(value, ModuleType | FunctionType | type):
            inner = inspect.getattr_static(value, "__dict__", None)
            if inner is not None:
                yield from _queues_in(vars(value), depth=depth - 1)
