"""What a failed request leaves in the queues that an app keeps from one request to the next.

Apps often have one streamer, or one queue, for all requests. A thread that generates puts into it, `infer` takes from
it. When `infer` fails in between, the rest of the answer stays there, and the next caller would get it.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

from tailrace.serve.inferless.threads import Threads

__all__ = ["Marks"]

_QUIET_S = 10.0  # a thread that puts nothing for so long is not waited for: it may be one that never ends
_LIMIT_S = 60.0
_LOOK_S = 0.02  # nothing says both that a thread has ended and that it has put something

_Queue: TypeAlias = "queue.Queue[Any] | queue.SimpleQueue[Any] | asyncio.Queue[Any]"  # Any: the app's


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
