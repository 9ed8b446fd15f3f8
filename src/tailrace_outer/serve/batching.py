"""`@serve.batch`: combines single calls into batches for a function that takes lists.

It replaces Ray Serve's decorator, and differs where that decorator loses calls or work:

1. Each instance of a class and each event loop has its own queue. A function is a method if its first
   parameter is called `self` or `cls`.
2. A batch accepts calls until it runs or is full, also while the function is busy.
3. The function is cancelled when every caller has left. A generator whose callers have all finished is resumed once
   more, so that the code after its last yield runs, and is closed if it yields again.
4. An exception at a caller's position is raised to that caller alone. The classes StopIteration and StopAsyncIteration
   end a caller's stream; their instances are ordinary items.
5. Every parameter arrives as a list, with defaults filled in.
6. Everything is bounded: waiting calls by `max_queued`, unread items by a pause. A generator pauses while all its
   callers have 64 unread items. A caller with 4096 unread items fails, and loses them.
7. The function runs in the context (`contextvars`) in which it was decorated, not in that of a caller.
8. A call with an HTTP request waits until the request's body is there. Otherwise a client that sends half a body would
   delay its whole batch, and fail it when it leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from statistics import fmean
from typing import Any, Protocol, overload

from starlette.requests import Request

from tailrace_outer.serve._batches import Batch, ContinuousRun, PlainRun, StreamRun
from tailrace_outer.serve._calls import BatchSettings, Call, Member, Queue, Running, Stream
from tailrace_outer.serve.context import max_ongoing_requests

__all__ = ["Batch", "Member", "batch"]

logger = logging.getLogger("tailrace.serve")


class Batched(Protocol):
    """A decorated function. The Anys: no type can express that list parameters have become element parameters."""

    __name__: str
    __wrapped__: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return an awaitable or an async iterator."""

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Applies to batches that begin later. Raises: TypeError, ValueError."""

    def set_batch_wait_timeout_s(self, batch_wait_timeout_s: float) -> None:
        """Applies to batches that begin later. Raises: TypeError, ValueError."""

    def _get_max_batch_size(self) -> int: ...
    def _get_batch_wait_timeout_s(self) -> float: ...
    def _get_curr_iteration_start_times(self) -> StartTimes: ...
    async def _is_batching_task_alive(self) -> bool: ...
    async def _get_handling_task_stack(self) -> str: ...


@overload
def batch(_func: Callable[..., Any], /) -> Batched: ...
@overload
def batch(
    _func: None = None,
    /,
    max_batch_size: int = 10,
    batch_wait_timeout_s: float = 0.01,
    max_concurrent_batches: int = 1,
    *,
    batch_size_fn: Callable[[list[Any]], int] | None = None,
    max_queued: int = 1000,
    continuous: bool = False,
) -> Callable[[Callable[..., Any]], Batched]: ...
def batch(
    _func: Callable[..., Any] | None = None,
    /,
    max_batch_size: int = 10,
    batch_wait_timeout_s: float = 0.01,
    max_concurrent_batches: int = 1,
    *,
    batch_size_fn: Callable[[list[Any]], int] | None = None,
    max_queued: int = 1000,
    continuous: bool = False,
) -> Any:
    """Answer many calls with one call of an `async def` function that takes and returns lists.

    A coroutine function returns one result for each call. An async generator function yields lists with one item for
    each call of its batch, also for calls that have finished. The decorated generator function queues its call at once
    and returns an async iterator.

    A batch starts when it has `max_batch_size` calls or when its first call has waited `batch_wait_timeout_s`, and
    fewer than `max_concurrent_batches` are running. A timeout of 0 takes the calls of the same turn of the event loop.
    `batch_size_fn` gets a list of first arguments and returns the batch's size; by default the size is the number of
    calls. A call that has an HTTP request among its arguments is queued when the request's body is there.
    `set_max_batch_size` and `set_batch_wait_timeout_s` of the decorated function change the limits of batches that
    begin later.

    With `continuous`, calls join and leave a running generator. It takes one `Batch`, and yields a mapping from
    `Member` to its next item, or to StopIteration when the member is finished. Callers may pass any arguments.

    Cancellation: a cancelled caller leaves its batch, which goes on while it has other callers.

    Raises: TypeError, ValueError for invalid settings. A call raises TypeError if it does not fit the function,
    BackPressureError if `max_queued` calls wait already, RuntimeError if its size is too large for any batch,
    ServeError if the function returns the wrong number of results, and the function's own exceptions.
    """

    settings = BatchSettings(max_batch_size, batch_wait_timeout_s, max_concurrent_batches, batch_size_fn, max_queued)

    def decorate(function: Callable[..., Any]) -> Any:
        batcher = _Batcher(function, dataclasses.replace(settings), continuous=continuous)
        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            def batched(*args: Any, **kwargs: Any) -> Any:
                requests = _requests(args, kwargs)
                call = functools.partial(batcher.call, args, kwargs)
                return _stream_after_bodies(requests, call) if requests else Stream(call())
        else:

            @functools.wraps(function)
            async def batched(*args: Any, **kwargs: Any) -> Any:
                await _read_bodies(_requests(args, kwargs))
                call = batcher.call(args, kwargs)
                try:
                    return await call.read()
                finally:
                    call.leave()

        for name, attribute in batcher.attributes().items():
            setattr(batched, name, attribute)
        return batched

    return decorate if _func is None else decorate(_func)


def _requests(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Request]:
    return [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Request)]


async def _read_bodies(requests: list[Request]) -> None:
    """Read the bodies, which the requests keep. Raises: ClientDisconnect."""
    for request in requests:
        with contextlib.suppress(RuntimeError):  # somebody has read it as a stream: there is nothing to wait for
            await request.body()


async def _stream_after_bodies(requests: list[Request], call: Callable[[], Call]) -> AsyncIterator[Any]:
    await _read_bodies(requests)
    async with contextlib.aclosing(Stream(call())) as items:
        async for item in items:
            yield item


@dataclasses.dataclass(frozen=True, slots=True)
class StartTimes:
    """The start times of the running batches, in seconds since 1970."""

    start_times: tuple[float, ...]

    @property
    def min_start_time(self) -> float | None:
        return min(self.start_times, default=None)

    @property
    def mean_start_time(self) -> float | None:
        return fmean(self.start_times) if self.start_times else None

    @property
    def max_start_time(self) -> float | None:
        return max(self.start_times, default=None)


class _Batcher:
    """One decorated function: its settings and its queues."""

    def __init__(self, function: Callable[..., Any], settings: BatchSettings, *, continuous: bool) -> None:
        is_stream = inspect.isasyncgenfunction(function)
        if not is_stream and not inspect.iscoroutinefunction(function):
            raise TypeError("Functions decorated with @serve.batch must be 'async def'.")
        if continuous and not is_stream:
            raise TypeError("With continuous=True the function is an async generator: 'async def' with 'yield'.")
        self._function = function
        self._name = getattr(function, "__qualname__", repr(function))
        self._settings = settings
        self._continuous = continuous
        self._run_type = ContinuousRun if continuous else StreamRun if is_stream else PlainRun
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())
        self._is_method = bool(parameters) and parameters[0].name in ("self", "cls")
        self._signature = signature.replace(parameters=parameters[self._is_method :])
        if continuous:
            self._signature.bind(None)  # it takes only the batch
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without the parts that belong to this process."""
        local = ("_context", "_queues", "_warned")
        return {name: value for name, value in self.__dict__.items() if name not in local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._context = contextvars.copy_context()
        self._warned: tuple[int, int] | None = None
        # By loop, then by id of the instance. A queue exists only while it has calls. They keep the instance alive, so
        # that its id stays unique. Idle instances are not referenced here.
        self._queues: dict[asyncio.AbstractEventLoop, dict[int, Queue]] = {}

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Queue a call. Raises: TypeError if it does not fit the function; BackPressureError."""
        owner = None
        if self._is_method:
            if not args:
                raise TypeError(f"{self._name}() was called without an instance.")
            owner, *rest = args
            args = tuple(rest)
        if not self._continuous:
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        call = Call(Member(args, kwargs), self._settings)
        self._queue(owner, call.loop).add(call)
        return call

    def _queue(self, owner: object, loop: asyncio.AbstractEventLoop) -> Queue:
        queue = self._queues.get(loop, {}).get(id(owner))
        if queue is None:
            for other in list(self._queues):
                if other.is_closed():  # its calls cannot get results any more
                    self._queues.pop(other, None)
            queue = Queue(owner, self._settings, self._start, self._forget)
            self._queues.setdefault(loop, {})[id(owner)] = queue
            self._warn()
        return queue

    def _start(self, queue: Queue, calls: list[Call]) -> Running:
        function = self._function if queue.owner is None else functools.partial(self._function, queue.owner)
        return self._run_type(function, calls, queue, self._context.copy())

    def _forget(self, queue: Queue) -> None:
        """Remove a queue that has no calls."""
        queues = self._queues.get(queue.loop, {})
        if queues.get(id(queue.owner)) is queue:
            del queues[id(queue.owner)]
            if not queues:
                del self._queues[queue.loop]

    def _warn(self) -> None:
        settings, bound = self._settings, max_ongoing_requests()
        needed = settings.max_batch_size * settings.max_concurrent_batches
        if bound is not None and bound < needed and self._warned != (bound, needed):
            self._warned = (bound, needed)
            logger.warning(
                "%s can batch %d requests (max_batch_size=%d, max_concurrent_batches=%d), but its deployment takes "
                "only max_ongoing_requests=%d at once: such batches never fill.",
                self._name,
                needed,
                settings.max_batch_size,
                settings.max_concurrent_batches,
                bound,
            )

    def _runs(self) -> list[Running]:
        return [run for queues in list(self._queues.values()) for queue in list(queues.values()) for run in queue.runs]

    def attributes(self) -> dict[str, Callable[..., Any]]:
        """Return the attributes of the decorated function. They work with and without an instance."""
        settings = self._settings
        return {
            "set_max_batch_size": self.set_max_batch_size,
            "set_batch_wait_timeout_s": settings.set_batch_wait_timeout_s,
            "_get_max_batch_size": lambda: settings.max_batch_size,
            "_get_batch_wait_timeout_s": lambda: settings.batch_wait_timeout_s,
            "_get_curr_iteration_start_times": lambda: StartTimes(tuple(run.started_s for run in self._runs())),
            "_is_batching_task_alive": self.is_alive,
            "_get_handling_task_stack": self.get_stack,
        }

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Raises: TypeError, ValueError."""
        self._settings.set_max_batch_size(max_batch_size)
        self._warned = None
        self._warn()

    async def is_alive(self) -> bool:
        """Return True: there is no background task that could die, since calls start their batches themselves."""
        return True

    async def get_stack(self) -> str:
        """Return the stacks of the running batches, or ""."""
        return "".join(run.stack() for run in self._runs())
