"""The runs of a batched function, each of which answers several calls."""

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

from tailrace.serve import metrics
from tailrace.serve._calls import AHEAD_ITEMS, Call, Member, Queue
from tailrace.serve.closing import Scope
from tailrace.serve.context import RequestContext, set_batch_request_contexts, set_request_context
from tailrace.serve.exceptions import BackPressureError, ServeError

__all__ = ["Batch", "ContinuousRun", "PlainRun", "StreamRun"]

logger = logging.getLogger("tailrace.serve")

_UNREAD_ITEMS = 4096  # unread by one: it keeps memory that the others pay for
_A_BATCH_GIVES = "a function with @serve.batch gives a list with a place for each element of the lists that it takes"
_SENTINELS = (StopIteration, StopAsyncIteration)


class Batch:
    """Who is in a continuous batch, as of the last yield. What happens until the next one is told there.

    True while somebody is in it: `while batch:` is how its function ends in time.
    """

    __slots__ = ("joined", "left", "members")

    def __init__(self) -> None:
        self.joined: tuple[Member, ...] = ()  # since the yield before
        self.left: tuple[Member, ...] = ()  # since then, because they were finished or went away
        self.members: tuple[Member, ...] = ()  # all, in order of arrival

    def __bool__(self) -> bool:
        return bool(self.members)


class BatchRun:
    """One run of the function. Its task ends by itself, or is cancelled when every caller has left."""

    def __init__(
        self, function: Callable[..., Any], calls: Sequence[Call], queue: Queue, context: contextvars.Context
    ) -> None:
        self.started_s = time.time()
        self._name = getattr(
            getattr(function, "func", function), "__qualname__", "batch"
        )  # of a partial, its function's
        self._began_s = asyncio.get_running_loop().time()
        metrics.batch_began(self._name, size=len(calls), waited_s=self._began_s - calls[0].called_s)
        self._function = function
        self._calls = tuple(calls)  # who has which position, to the end
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
            await self._answer()
        except BaseException:
            await self._scope.close()
            raise

    async def _answer(self) -> None:
        """Call the function and hand out what it gives. Who is open at the end is ended by `_done`."""
        raise NotImplementedError

    def leave(self, call: Call) -> None:
        del self._open[call]
        if not self._open:
            self._task.cancel()

    def resume(self) -> None:
        """It does not pause."""

    def stack(self) -> str:
        """The line at which the function is, or nothing."""
        frame = getattr(self._source, "cr_frame", None) or getattr(self._source, "ag_frame", None)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def _columns(self) -> tuple[list[list[Any]], dict[str, list[Any]]]:
        """The arguments as the function wants them: a list for each. What a call has not got is None there."""
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
            raise TypeError(f"{self._name} gave a {name}; {_A_BATCH_GIVES}.") from None
        if length != len(self._calls):
            raise ServeError(f"{self._name} was called with {len(self._calls)} and gave {length}; {_A_BATCH_GIVES}.")

    def _close(self, call: Call, error: BaseException | None = None) -> None:
        del self._open[call]
        call.end(error)

    def _done(self, task: asyncio.Task[None]) -> None:
        metrics.batch_ended(self._name, ran_s=asyncio.get_running_loop().time() - self._began_s)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and not self._open and not task.cancelled():
            logger.warning("A batch failed when none of its callers was there any more.", exc_info=error)
        for call in self._open:
            call.end(error)
        self._open.clear()
        self._queue.ended(self)


class PlainRun(BatchRun):
    """Of a coroutine function."""

    async def _answer(self) -> None:
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
    """Of an async generator function."""

    _wakeup: asyncio.Future[None] | None = None

    async def _answer(self) -> None:
        args, kwargs = self._columns()
        self._source = self._function(*args, **kwargs)
        async with aclosing(self._source):
            async for results in self._source:
                if not self._open:  # it was asked once more, so that what stands behind its last yield could run
                    return
                self._check_length(results)
                items = [results[position] for position in range(len(self._calls))]
                for call, item in zip(self._calls, items, strict=True):
                    self._hand(call, item)
                await self._pause()

    def resume(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def _hand(self, call: Call, item: Any) -> None:
        if call not in self._open:
            return
        if item is StopIteration or item is StopAsyncIteration:  # never ==: arrays compare element by element
            self._close(call)
        elif _is_error(item):
            self._close(call, item)
        else:
            call.give(item)
            if len(call.items) >= _UNREAD_ITEMS:
                call.items.clear()
                self._close(call, BackPressureError(f"This reader is too slow: {_UNREAD_ITEMS} items were unread."))

    async def _pause(self) -> None:
        """Let the readers read before the next item is made; wait while all of them have enough to read."""
        await asyncio.sleep(0)  # a function that never awaits would keep the loop from everybody
        while self._is_ahead():
            self._wakeup = asyncio.get_running_loop().create_future()
            try:
                await self._wakeup
            finally:
                self._wakeup = None

    def _is_ahead(self) -> bool:
        return bool(self._open) and all(len(call.items) >= AHEAD_ITEMS for call in self._open)


class ContinuousRun(StreamRun):
    """Of an async generator function whose callers come and go."""

    async def _answer(self) -> None:
        batch = Batch()
        self._tell(batch)
        calls = {call.given: call for call in self._open}
        self._source = self._function(batch)
        async with aclosing(self._source):
            async for items in self._source:
                if not batch:  # it was told that nobody is there, and goes on
                    return
                if not isinstance(items, Mapping):
                    raise TypeError(f"A continuous batch yields a mapping of members, not {type(items).__name__}.")
                for member, item in items.items():
                    if not isinstance(member, Member):
                        raise TypeError(f"A continuous batch yields items for its members, not {member!r}.")
                    if member in calls:  # else it has left, which the function could not know
                        self._hand(calls[member], item)
                await self._pause()
                self._tell(batch)
                calls = {call.given: call for call in self._open}

    def leave(self, call: Call) -> None:
        super().leave(call)
        self.resume()  # there is room for another

    def _is_ahead(self) -> bool:
        for call in self._queue.join(self._open):
            call.holder = self
        return super()._is_ahead()

    def _tell(self, batch: Batch) -> None:
        before, now = set(batch.members), tuple(call.given for call in self._open)
        batch.joined = tuple(member for member in now if member not in before)
        batch.left = tuple(member for member in batch.members if member not in set(now))
        batch.members = now
        self._contexts[:] = [call.context for call in self._open]


def _is_error(item: Any) -> bool:
    """Whether a position holds an error for its caller. A sentinel that is an instance is an item like any other."""
    return isinstance(item, Exception) and not isinstance(item, _SENTINELS)
