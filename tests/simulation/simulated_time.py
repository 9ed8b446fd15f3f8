"""Time that passes only when nothing else is to be done, and one seed for everything that is random.

Each simulated process has an event loop of its own, with its own clocks. So a process can be frozen, or die between any
two steps of its tasks, as if the kernel had killed it: nothing of it runs any more, not even a `finally`.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import secrets
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar, cast
from unittest.mock import patch

__all__ = ["Process", "Simulation", "Violation"]

T = TypeVar("T")

_START_S = 1000.0
_EPOCH_S = 1_700_000_000.0  # the time of day when a simulation begins


class Violation(AssertionError):
    """A law was broken."""


class _Handle:
    """What a process is to do next, or at a time."""

    __slots__ = ("_args", "_callback", "_context", "is_cancelled", "when_s")

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[object, ...],
        context: contextvars.Context | None,
        when_s: float = 0.0,
    ) -> None:
        self._callback = callback
        self._args = args
        self._context = context
        self.when_s = when_s
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.when_s

    def run(self) -> None:
        if self._context is None:
            self._callback(*self._args)
        else:
            self._context.run(self._callback, *self._args)


class _Task(asyncio.Task[T]):
    """A task whose place in a set does not depend on where it is in memory."""

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, T],
        process: Process,
        number: int,
        name: str,
        context: contextvars.Context | None,
    ) -> None:
        self._number = number
        loop: Any = process  # Any: as in `create_future`
        super().__init__(coroutine, loop=loop, name=name, context=context)
        self._log_destroy_pending = False  # those of the dead never end

    def __hash__(self) -> int:
        return self._number


class Process:
    """The event loop of one process: what asyncio's tasks, futures and timeouts need of one.

    `offset_s` and `rate` are of its monotonic clock, `wall_offset_s` of its time of day.
    """

    def __init__(
        self, simulation: Simulation, name: str, *, offset_s: float = 0.0, rate: float = 1.0, wall_offset_s: float = 0.0
    ) -> None:
        self.name = name
        self.is_dead = False
        self.is_frozen = False
        self.steps_left: int | None = None  # until it dies
        self.ready: deque[_Handle] = deque()
        self._simulation = simulation
        self._offset_s = offset_s
        self._rate = rate
        self.wall_offset_s = wall_offset_s

    def die(self) -> None:
        self.is_dead = True
        self.ready.clear()

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        if self.ready:
            self._simulation.is_ready(self)

    # As in asyncio

    def time(self) -> float:
        return self._simulation.now_s * self._rate + self._offset_s

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        handle = _Handle(callback, args, context or contextvars.copy_context())
        if not self.is_dead:
            if not self.ready:
                self._simulation.is_ready(self)
            self.ready.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        handle = _Handle(callback, args, context or contextvars.copy_context(), when)
        self._simulation.push((when - self._offset_s) / self._rate, self, handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:  # Any: of its result
        loop: Any = self  # Any: it is no AbstractEventLoop, which has 40 methods more
        return asyncio.Future(loop=loop)

    def create_task(
        self, coro: Coroutine[Any, Any, T], *, name: object = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[T]:
        task = _Task(coro, self, self._simulation.number(), str(name or "task"), context)
        self._simulation.remember(task)
        return task

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Run it at once: it takes no time here."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._simulation.failures.append(f"{self.name}: {context.get('message')}: {context.get('exception')!r}")


class Simulation:
    """Runs processes, one step of one of them at a time. `failures` are errors that nobody has handled."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_s = _START_S
        self.num_steps = 0
        self.failures: list[str] = []
        self.on_death: Callable[[Process], None] = Process.die  # of one whose `steps_left` are used up
        self._current: Process | None = None
        self._numbers = itertools.count()
        self._agenda: list[tuple[float, int, Process | None, _Handle]] = []
        self._ready: deque[Process] = deque()
        self._tasks: list[asyncio.Task[Any]] = []

    # What happens

    def at(self, when_s: float, callback: Callable[..., object], *args: object) -> None:
        """Let something happen that is not done by a process, at a time of the simulation."""
        self.push(when_s, None, _Handle(callback, args, None))

    def after(self, delay_s: float, callback: Callable[..., object], *args: object) -> None:
        self.at(self.now_s + delay_s, callback, *args)

    def push(self, when_s: float, process: Process | None, handle: _Handle) -> None:
        heapq.heappush(self._agenda, (when_s, self.number(), process, handle))

    def number(self) -> int:
        """Return a number that is larger than those before."""
        return next(self._numbers)

    def is_ready(self, process: Process) -> None:
        """A process has something to do."""
        self._ready.append(process)

    def remember(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)

    def run(self, is_over: Callable[[], bool], *, until_s: float) -> bool:
        """Run until it is over, or something has failed. Returns False if nothing is left to do, or at this time of the
        simulation."""
        while True:
            while self._ready:
                process = self._ready.popleft()
                if not process.is_frozen:
                    self._run(process)
            if self.failures or is_over():
                return True
            while self._agenda and self._agenda[0][3].is_cancelled:
                heapq.heappop(self._agenda)
            if not self._agenda or self._agenda[0][0] > until_s:
                return False
            when_s, _, process_due, handle = heapq.heappop(self._agenda)
            self.now_s = max(self.now_s, when_s)
            if process_due is None:
                handle.run()
            elif not process_due.is_dead:
                if not process_due.ready and not process_due.is_frozen:
                    self._ready.append(process_due)
                process_due.ready.append(handle)

    def _run(self, process: Process) -> None:
        """Run what a process has to do now."""
        self._current = process
        asyncio._set_running_loop(cast("asyncio.AbstractEventLoop", process))
        try:
            ready = process.ready
            while ready and not process.is_frozen:
                handle = ready.popleft()
                if handle.is_cancelled:
                    continue
                self.num_steps += 1
                handle.run()
                if process.steps_left is not None:
                    process.steps_left -= 1
                    if process.steps_left <= 0:
                        process.steps_left = None
                        self.on_death(process)
        finally:
            asyncio._set_running_loop(None)
            self._current = None

    # Clocks and chance

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the context, the clocks and the random numbers of this interpreter are those of this simulation."""

        def monotonic_s() -> float:
            return self._current.time() if self._current is not None else self.now_s

        def time_s() -> float:
            return _EPOCH_S + self.now_s + (self._current.wall_offset_s if self._current is not None else 0.0)

        def token_urlsafe(num_bytes: int = 32) -> str:
            return "".join(self.random.choices(_LETTERS, k=(num_bytes * 8 + 5) // 6))

        def token_hex(num_bytes: int = 32) -> str:
            return f"{self.random.getrandbits(8 * num_bytes):0{2 * num_bytes}x}"

        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=lambda generator: None)  # those of the dead are not closed
        with (
            patch.object(time, "monotonic", monotonic_s),
            patch.object(time, "time", time_s),
            patch.object(time, "time_ns", lambda: int(time_s() * 1e9)),
            patch.object(secrets, "token_urlsafe", token_urlsafe),
            patch.object(secrets, "token_hex", token_hex),
            patch.object(secrets, "randbits", self.random.getrandbits),
        ):
            try:
                yield
            finally:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # there are coroutines that nobody awaits any more
                    self._close()
                sys.set_asyncgen_hooks(*hooks)

    def _close(self) -> None:
        """Let nothing of this simulation run later, when its memory is freed."""
        for task in self._tasks:
            coroutine: Any = task.get_coro()  # Any: as in asyncio
            process = task.get_loop()
            asyncio._set_running_loop(process)
            asyncio._enter_task(process, task)
            for _ in range(_MOST_AWAITS):
                try:
                    coroutine.close()
                except RuntimeError:  # it waits for something else now, to leave a context
                    continue
                except BaseException:
                    pass
                break
            asyncio._leave_task(process, task)
        asyncio._set_running_loop(None)
        self._tasks.clear()
        self._agenda.clear()
        self._ready.clear()


_MOST_AWAITS = 50
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
