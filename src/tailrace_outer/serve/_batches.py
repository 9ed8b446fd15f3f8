"""Runs a batched function. Each run gives the results of several calls."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import zip_longest
from typing import Any

from tailrace_outer.serve import metrics
from tailrace_outer.serve._calls import AHEAD_ITEMS, Call, Member, Queue
from tailrace_outer.serve.closing import Scope
from tailrace_outer.serve.context import RequestContext, set_batch_request_contexts, set_request_context
from tailrace_outer.serve.exceptions import BackPressureError, ServeError

__all__ = ["Batch", "ContinuousRun", "PlainRun", "StreamRun"]

logger = logging.getLogger("tailrace.serve")

_MAX_UNREAD_ITEMS = 4096  # of one slow reader, whose call then fails
_RETURN_RULE = "a function with @serve.batch returns a list with one element for each call in the batch"
_SENTINELS = (StopIteration, StopAsyncIteration)


class Batch:
    """The members of a continuous batch. It changes only while the function is at a `yield`.

    A batch with members is true: the function loops `while batch:` and so ends in time.
    """

    __slots__ = ("joined", "left", "members")

    def __init__(self) -> None:
        self.joined: tuple[Member, ...] = ()  # since the previous yield
        self.left: tuple[Member, ...] = ()  # since the previous yield: finished or cancelled
        self.members: tuple[Member, ...] = ()  # all, in order of arrival

    def __bool__(self) -> bool:
        return bool(self.members)


class BatchRun:
    """One run of the function. Its task is cancelled when all callers have left."""

    def __init__(
        self, function: Callable[..., Any], calls: Sequence[Call], queue: Queue, context: contextvars.Context
    ) -> None:
        self.started_s = time.time()
        self._name = getattr(
            getattr(function, "func", function), "__qualname__", "batch"
        )  # a partial has no name: its function has one
        self._began_s = asyncio.get_running_loop().time()
        metrics.batch_began(self._name, size=len(calls), waited_s=self._began_s - calls[0].called_s)
        self._function = function
        self._calls = tuple(calls)  # by position; positions never change
        self._open = dict.fromkeys(calls)
        self._queue = queue
        self._contexts = [call.context for call in calls]
        self._source: Any = None
        for call in calls:
            call.holder = self
        context.run(set_request_context, RequestContext())
        context.run(set_batch_request_contexts, self._contexts)
        self._scope = Scope()
        context.run(self._scope.enter)
        self._task = asyncio.get_running_loop().create_task(self._run(), context=context)
        self._task.add_done_callback(self._done)

    async def _run(self) -> None:
        try:
            await self._give_results()
        except BaseException:
            await self._scope.close()
            raise

    async def _give_results(self) -> None:
        """Call the function and deliver its results. `_done` ends the calls that are still open afterwards."""
        raise NotImplementedError

    def leave(self, call: Call) -> None:
        del self._open[call]
        if not self._open:
            self._task.cancel()

    def resume(self) -> None:
        """Does nothing: this run does not pause."""

    def stack(self) -> str:
        """Return the stack of the function's current line, or ""."""
        frame = getattr(self._source, "cr_frame", None) or getattr(self._source, "ag_frame", None)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def _columns(self) -> tuple[list[list[Any]], dict[str, list[Any]]]:
        """Return a list for each argument of the function, with None for calls that lack the argument."""
        given = [call.given for call in self._calls]
        names = dict.fromkeys(name for member in given for name in member.kwargs)
        return (
            [list(column) for column in zip_longest(*(member.args for member in given))],
            {name: [member.kwargs.get(name) for member in given] for name in names},
        )

    def _check_length(self, results: Any) -> None:
        try:
            length = len(results)
        except TypeError:
            name = type(results).__name__
            raise TypeError(f"{self._name} returned a {name}; {_RETURN_RULE}.") from None
        if length != len(self._calls):
            raise ServeError(f"{self._name} got {len(self._calls)} elements and returned {length}; {_RETURN_RULE}.")

    def _close(self, call: Call, error: BaseException | None = None) -> None:
        del self._open[call]
        call.end(error)

    def _done(self, task: asyncio.Task[None]) -> None:
        metrics.batch_ended(self._name, ran_s=asyncio.get_running_loop().time() - self._began_s)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and not self._open and not task.cancelled():
            logger.warning("A batch failed after all of its callers had left.", exc_info=error)
        for call in self._open:
            call.end(error)
        self._open.clear()
        self._queue.ended(self)


class PlainRun(BatchRun):
    """A run of a coroutine function."""

    async def _give_results(self) -> None:
        args, kwargs = self._columns()
        self._source = self._function(*args, **kwargs)
        results = await self._source
        self._check_length(results)
        for call, result in zip(self._calls, list(results), strict=True):
            if call not in self._open:
                continue
            if _is_error(result):
                self._close(call, result)
            else:
                call.give(result)
                self._close(call)


class StreamRun(BatchRun):
    """A run of an async generator function."""

    _wakeup: asyncio.Future[None] | None = None

    async def _give_results(self) -> None:
        args, kwargs = self._columns()
        self._source = self._function(*args, **kwargs)
        async with aclosing(self._source):
            async for results in self._source:
                if not self._open:  # resumed once more, so that the code after the last yield ran
                    return
                self._check_length(results)
                items = [results[position] for position in range(len(self._calls))]
                for call, item in zip(self._calls, items, strict=True):
                    self._deliver(call, item)
                await self._pause()

    def resume(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def _deliver(self, call: Call, item: Any) -> None:
        if call not in self._open:
            return
        if item is StopIteration or item is StopAsyncIteration:  # not ==, which arrays apply to each element
            self._close(call)
        elif _is_error(item):
            self._close(call, item)
        else:
            call.give(item)
            if len(call.items) >= _MAX_UNREAD_ITEMS:
                call.items.clear()
                self._close(call, BackPressureError(f"The reader is too slow: {_MAX_UNREAD_ITEMS} items are unread."))

    async def _pause(self) -> None:
        """Let the readers run, and wait while all of them have enough unread items."""
        await asyncio.sleep(0)  # a function that never awaits would block the loop
        while self._is_ahead():
            self._wakeup = asyncio.get_running_loop().create_future()
            try:
                await self._wakeup
            finally:
                self._wakeup = None

    def _is_ahead(self) -> bool:
        return bool(self._open) and all(len(call.items) >= AHEAD_ITEMS for call in self._open)


class ContinuousRun(StreamRun):
    """A run of an async generator function whose callers join and leave."""

    async def _give_results(self) -> None:
        batch = Batch()
        self._update(batch)
        calls = {call.given: call for call in self._open}
        self._source = self._function(batch)
        async with aclosing(self._source):
            async for items in self._source:
                if not batch:  # the function goes on although the batch is empty
                    return
                if not isinstance(items, Mapping):
                    raise TypeError(f"A continuous batch yields a mapping of members, not {type(items).__name__}.")
                for member, item in items.items():
                    if not isinstance(member, Member):
                        raise TypeError(f"A continuous batch yields items for its members, not {member!r}.")
                    if member in calls:  # else it has left since the last yield
                        self._deliver(calls[member], item)
                await self._pause()
                self._update(batch)
                calls = {call.given: call for call in self._open}

    def leave(self, call: Call) -> None:
        super().leave(call)
        self.resume()  # another call may join

    def _is_ahead(self) -> bool:
        for call in self._queue.join(self._open):
            call.holder = self
        return super()._is_ahead()

    def _update(self, batch: Batch) -> None:
        before, now = set(batch.members), tuple(call.given for call in self._open)
        batch.joined = tuple(member for member in now if member not in before)
        batch.left = tuple(member for member in batch.members if member not in set(now))
        batch.members = now
        self._contexts[:] = [call.context for call in self._open]


def _is_error(item: Any) -> bool:
    """Return whether an item is an error for its caller. Instances of the sentinel classes are ordinary items."""
    return isinstance(item, Exception) and not isinstance(item, _SENTINELS)
