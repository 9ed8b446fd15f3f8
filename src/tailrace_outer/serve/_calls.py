"""The calls of a batched function, and the queue in which they wait for a batch."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from tailrace_outer.serve.closing import close_on_abort
from tailrace_outer.serve.context import RequestContext, get_request_context
from tailrace_outer.serve.exceptions import BackPressureError

__all__ = [
    "AHEAD_ITEMS",
    "BatchSettings",
    "Call",
    "Member",
    "Queue",
    "Running",
    "Stream",
]

AHEAD_ITEMS = 64  # the function pauses when every caller has so many unread items

_MAX_TIMER_S = 86400.0  # event loops reject infinity

# Every Any in these modules is an argument or a result of user code, whose type a decorator cannot know.


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One call in a continuous batch. Compared by identity, so that it can be a key."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def first(self) -> Any:
        """The first argument, positional or by keyword."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()), None)


class Holder(Protocol):
    """The queue or the run that a call is in."""

    def leave(self, call: Call) -> None:
        """Remove a call whose caller has left."""

    def resume(self) -> None:
        """Called when a caller has read items, or when another call could join."""


class Running(Holder, Protocol):
    """One run of the function, as its queue sees it."""

    @property
    def started_s(self) -> float:
        """Seconds since 1970, to compare with logs."""

    def stack(self) -> str:
        """Return the stack of the function's current line, or ""."""


class Call:
    """One call, until it has its result or its caller leaves. Its result is one item or several.

    `holder` is None after the end.
    """

    __slots__ = (
        "_error",
        "_wakeup",
        "called_s",
        "context",
        "due_s",
        "given",
        "holder",
        "items",
        "loop",
        "max_batch_size",
    )

    def __init__(self, given: Member, settings: BatchSettings) -> None:
        self.given = given
        self.loop = asyncio.get_running_loop()
        self.called_s = self.loop.time()
        self.due_s = self.called_s + settings.batch_wait_timeout_s
        self.max_batch_size = settings.max_batch_size
        self.context: RequestContext = get_request_context()
        self.holder: Holder | None = None
        self.items: deque[Any] = deque()  # unread
        self._error: BaseException | None = None
        self._wakeup: asyncio.Future[None] | None = None

    def give(self, item: Any) -> None:
        """Add an item for the caller."""
        self.items.append(item)
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """End the call, after success or with an error."""
        self.holder = None
        self._error = error
        self._wake()

    def leave(self) -> None:
        """Abandon the call, because its caller has left."""
        holder, self.holder = self.holder, None
        if holder is not None:
            holder.leave(self)
        self.items.clear()
        self._error = None
        self._wake()

    async def read(self) -> Any:
        """Return the next item. Cancellation: abandons the call, as with an async generator.

        Raises: the error that ended the call, once; StopAsyncIteration after that, and after success.
        """
        if self._wakeup is not None:
            raise RuntimeError("This stream has a reader already.")
        while not self.items:
            if self.holder is None:
                error, self._error = self._error, None
                raise error if error is not None else StopAsyncIteration
            self._wakeup = self.loop.create_future()
            try:
                await self._wakeup
            except asyncio.CancelledError:
                self.leave()
                raise
            finally:
                self._wakeup = None
        item = self.items.popleft()
        if len(self.items) == AHEAD_ITEMS - 1 and self.holder is not None:
            self.holder.resume()
        return item

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


class Stream(AsyncIterator[Any]):
    """The caller's iterator over a call with several items. The call leaves the batch when the stream is closed or
    dropped, when a read is cancelled, and when the client of the request disconnects."""

    __slots__ = ("__weakref__", "_call", "_is_begun")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._is_begun = False
        close_on_abort(self)

    async def __anext__(self) -> Any:
        if not self._is_begun:
            self._is_begun = True
            close_on_abort(self)  # from now on, the reading task's request owns it
        return await self._call.read()

    async def aclose(self) -> None:
        """Leave the batch. A read in progress ends as at the end of the stream."""
        self._call.leave()

    def __del__(self) -> None:
        call = self._call
        if call.holder is not None:
            with suppress(RuntimeError):  # the loop is closed
                call.loop.call_soon_threadsafe(call.leave)  # the garbage collector may run in any thread


@dataclass(slots=True)
class BatchSettings:
    """The settings of `batch`. Raises: TypeError, ValueError."""

    max_batch_size: int
    batch_wait_timeout_s: float
    max_concurrent_batches: int
    batch_size_fn: Callable[[list[Any]], int] | None
    max_queued: int

    def __post_init__(self) -> None:
        self.set_max_batch_size(self.max_batch_size)
        self.set_batch_wait_timeout_s(self.batch_wait_timeout_s)
        if not isinstance(self.max_concurrent_batches, int) or self.max_concurrent_batches < 1:
            raise TypeError(f"max_concurrent_batches is a whole number from 1, not {self.max_concurrent_batches!r}.")
        if self.batch_size_fn is not None and not callable(self.batch_size_fn):
            raise TypeError(f"batch_size_fn is a function or None, not {self.batch_size_fn!r}.")
        if not isinstance(self.max_queued, int):
            raise TypeError(f"max_queued is a whole number, not {self.max_queued!r}.")
        if self.max_queued < 1:
            raise ValueError(f"max_queued is at least 1, not {self.max_queued}.")

    def set_max_batch_size(self, value: object) -> None:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int):
            raise TypeError(f"max_batch_size is a whole number, not {value!r}.")
        if value < 1:
            raise ValueError(f"max_batch_size is at least 1, not {value}.")
        self.max_batch_size = value

    def set_batch_wait_timeout_s(self, value: object) -> None:
        if not isinstance(value, int | float):
            raise TypeError(f"batch_wait_timeout_s is a number of seconds, not {value!r}.")
        if not value >= 0:  # rejects NaN too
            raise ValueError(f"batch_wait_timeout_s is at least 0, not {value}.")
        self.batch_wait_timeout_s = value


Start = Callable[["Queue", list[Call]], Running]  # a run of the function for these calls


class Queue:
    """The calls of one instance that wait for a batch, in order of arrival.

    `_forming` is the next batch, which may still grow. `_behind` holds later calls that did not fit or were not
    measured yet.
    """

    def __init__(self, owner: object, settings: BatchSettings, start: Start, forget: Callable[[Queue], None]) -> None:
        self.owner = owner
        self.loop = asyncio.get_running_loop()
        self.runs: dict[Running, None] = {}
        self._settings = settings
        self._start = start
        self._forget = forget
        self._forming: dict[Call, None] = {}
        self._is_full = False  # the batch that is forming
        self._behind: OrderedDict[Call, None] = OrderedDict()
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s: float | None = None

    def add(self, call: Call) -> None:
        """Queue a call. Raises: BackPressureError if too many calls wait."""
        call.holder = self
        self._behind[call] = None
        if self._num_waiting > self._settings.max_queued:
            self._advance()  # some may be startable already
            if self._num_waiting > self._settings.max_queued and call.holder is self:
                call.leave()
                raise BackPressureError("Too many calls are waiting for a batch.")
        for run in self.runs:
            run.resume()  # the call may join this run
        self._advance_soon()

    def leave(self, call: Call) -> None:
        if call in self._forming:
            del self._forming[call]
            self._is_full = False
        else:
            del self._behind[call]
        self._advance_soon()

    def resume(self) -> None:
        """Does nothing: a queue delivers no items."""

    def join(self, running: dict[Call, None]) -> list[Call]:
        """Move waiting calls into `running`, in order, while they fit. Returns the moved calls."""
        settings = self._settings
        if not self._num_waiting or (settings.batch_size_fn is None and len(running) >= settings.max_batch_size):
            return []
        for call in reversed(self._forming):
            self._behind[call] = None
            self._behind.move_to_end(call, last=False)
        self._forming, self._is_full = {}, False
        num_before = len(running)
        self._fill(running, settings.max_batch_size)
        self._advance_soon()
        return list(running)[num_before:]

    def ended(self, run: Running) -> None:
        """Called when a run has ended: another may start."""
        del self.runs[run]
        self._advance()

    @property
    def _num_waiting(self) -> int:
        return len(self._forming) + len(self._behind)

    def _advance_soon(self) -> None:
        if self._turn is None:
            self._turn = self.loop.call_soon(self._advance)

    def _advance(self) -> None:
        """Start the batches that are due, and set the timer for the next one."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        due_s = None
        while True:
            if not self._is_full:
                self._is_full = self._fill(self._forming)
            if not self._forming or len(self.runs) >= self._settings.max_concurrent_batches:
                break
            first_s = next(iter(self._forming)).due_s
            if not self._is_full and first_s > self.loop.time():
                due_s = first_s
                break
            calls, self._forming, self._is_full = list(self._forming), {}, False
            self.runs[self._start(self, calls)] = None
        self._set_timer(due_s)
        if not self._num_waiting and not self.runs:
            self._forget(self)

    def _set_timer(self, due_s: float | None) -> None:
        if due_s == self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = None, due_s
        if due_s is not None:
            self._timer = self.loop.call_at(min(due_s, self.loop.time() + _MAX_TIMER_S), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._timer_s = None  # a timer may fire slightly early; `_advance` then sets it again
        self._advance()

    def _fill(self, calls: dict[Call, None], limit: int | None = None) -> bool:
        """Move calls into a batch while they fit. Calls that never fit fail. Returns whether the batch is full."""
        while self._behind:
            call = next(iter(self._behind))
            most = limit or next(iter(calls), call).max_batch_size
            try:
                size = self._size(calls, call)
                if size > most:
                    alone, limit_alone = (self._size({}, call), call.max_batch_size) if calls else (size, most)
                    if alone > limit_alone:
                        raise RuntimeError(
                            f"The size of this call, {alone}, is larger than max_batch_size={limit_alone}."
                        )
            except (Exception, asyncio.CancelledError) as error:  # batch_size_fn fails on this call
                del self._behind[call]
                call.end(RuntimeError("batch_size_fn raised StopIteration.") if type(error) is StopIteration else error)
                continue
            if size > most:
                return True
            del self._behind[call]
            calls[call] = None
            if size >= most:
                return True
        return False

    def _size(self, calls: dict[Call, None], call: Call) -> int:
        measure = self._settings.batch_size_fn
        return len(calls) + 1 if measure is None else measure([member.given.first for member in (*calls, call)])
