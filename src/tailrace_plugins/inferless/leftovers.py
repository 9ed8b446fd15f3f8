"""Cleans up after a call of an app's `infer`: the threads that it has started, and the items in queues that the app
shares between requests.

Apps often generate in a thread and read the text from a queue. Often one streamer or queue serves all requests. This
has two consequences. If the thread dies, the app may wait for ever. If `infer` fails in between, the thread still fills
the queue, and the next caller would get the rest of the failed answer. Such items are removed. `Thread.start` is
patched, because there is no other way to know which call has started a thread.
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

from tailrace_plugins.inferless.inferless_errors import StreamCancelled

__all__ = ["Marks", "Threads", "unwatch", "watch"]

_MARK = "_tailrace_call"
_QUIET_S = 10.0  # after so long without a new item, a thread may never end: stop waiting for it
_LIMIT_S = 60.0
_POLL_S = 0.02  # no event signals both a thread's end and a new item

_Queue: TypeAlias = "queue.Queue[Any] | queue.SimpleQueue[Any] | asyncio.Queue[Any]"  # Any: the app's

_call: ContextVar[Threads | None] = ContextVar("tailrace_inferless_call", default=None)
_start = threading.Thread.start
_previous_hook: Callable[[threading.ExceptHookArgs], Any] = threading.excepthook  # Any: whatever a hook returns
_num_watching = 0


class Threads:
    """The threads that one call has started, directly or through its threads."""

    def __init__(self) -> None:
        self._started: list[threading.Thread] = []
        self.on_death: Callable[[BaseException], None] | None = None  # called in the thread that dies

    def begin(self) -> None:
        """Assign threads that this context starts from now on to the call."""
        _call.set(self)

    def others(self, *, alive: bool = False) -> bool:
        """Return whether the call has started threads other than the current one; with `alive`, only running ones
        count."""
        current = threading.current_thread()
        return any(thread is not current and (not alive or thread.is_alive()) for thread in tuple(self._started))

    def add(self, thread: threading.Thread) -> None:
        setattr(thread, _MARK, self)
        self._started.append(thread)


def watch() -> None:
    """Track threads that start and die, until `unwatch` has been called as often as this."""
    global _num_watching, _previous_hook
    _num_watching += 1
    if _num_watching == 1:
        _previous_hook = threading.excepthook
        threading.excepthook = _on_death
        threading.Thread.start = _tracked_start  # type: ignore[method-assign]


def unwatch() -> None:
    global _num_watching
    _num_watching -= 1
    if _num_watching == 0:
        if threading.excepthook is _on_death:
            threading.excepthook = _previous_hook
        if threading.Thread.start is _tracked_start:
            threading.Thread.start = _start  # type: ignore[method-assign]


def _tracked_start(self: threading.Thread) -> None:
    call: Threads | None = _call.get() or getattr(threading.current_thread(), _MARK, None)
    if call is not None and not self.name.startswith("asyncio_"):  # threads of `to_thread` are shared by all calls
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
    """The sizes of an app's queues when a call of `infer` began. Searches the app's instance and module, and the
    objects found there, such as a streamer."""

    def __init__(self, *holders: Mapping[str, Any]) -> None:  # Any: the app's
        self._holders = holders
        self._sizes = {id(one): one.qsize() for one in self._queues()}

    async def restore(self, threads: Threads) -> bool:
        """Remove the items that came since, until the call's threads have ended.

        Returns False if threads still add items after a minute.
        """
        # A queue that the call has made is cleared only if a thread may have filled it. Else the app may need its
        # items.
        is_new_ours = threads.others()
        sizes = [(one, self._sizes.get(id(one), 0)) for one in self._queues() if is_new_ours or id(one) in self._sizes]
        if not sizes:
            return True
        began_s = last_s = time.monotonic()
        while threads.others(alive=True):
            now_s = time.monotonic()
            if _drain(sizes):
                last_s = now_s
            if now_s - last_s > _QUIET_S:
                break
            if now_s - began_s > _LIMIT_S:
                return False
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(0)  # for items that a thread has passed to this event loop
        _drain(sizes)
        return True

    def _queues(self) -> Iterator[_Queue]:
        for holder in self._holders:
            yield from _queues_in(holder)


def _drain(sizes: Sequence[tuple[_Queue, int]]) -> bool:
    """Remove the items beyond each size. Returns whether there were any."""
    has_taken = False
    for one, size in sizes:
        while one.qsize() > size:
            try:
                one.get_nowait()
            except (queue.Empty, asyncio.QueueEmpty):  # another consumer was faster
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
