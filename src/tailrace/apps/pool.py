"""The processes of one deployment: kept running, and shared out to those who ask."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tailrace.apps.process import Answered, BootError, ReplicaProcess
from tailrace.errors import AdmissionError, AppUnavailable, Draining, QueueFull, TailraceError
from tailrace.serve.boot import AppTarget, Assignment, Part

__all__ = ["DRAIN_RETRY_S", "HostedApp", "Pool", "ReplicaLease"]

logger = logging.getLogger("tailrace.apps")

_HOPELESS = 3  # starts in a row that failed, after which nobody waits for another
_UNHEALTHY = 3  # checks in a row
_MAX_BACKOFF_S = 30.0
DRAIN_RETRY_S = 5.0


class ReplicaLease:
    """A place in one process, until it is given back."""

    __slots__ = ("_pool", "replica")

    def __init__(self, pool: Pool, replica: ReplicaProcess) -> None:
        self._pool = pool
        self.replica = replica

    def give_back(self) -> None:
        """Does nothing the second time."""
        pool, self._pool = self._pool, None  # type: ignore[assignment]  # None only from here on
        if pool is not None:
            pool._returned(self.replica)


class Pool:
    """First come, first served; the process with the least to do is taken."""

    def __init__(
        self,
        target: AppTarget,
        part: Part,
        *,
        root_path: str,
        load_s: float,
        queue_s: float,
        opened: Answered,
        hurrying: asyncio.Event,
    ) -> None:
        self.part = part
        self.options = part.options
        self.num_restarts = 0
        self.replicas: list[ReplicaProcess] = []  # those that can be asked
        self._target = target
        self._root_path = root_path
        self._load_s = load_s
        self._queue_s = queue_s
        self._opened = opened
        self._hurrying = hurrying  # nobody waits for the user's teardown any more
        self._waiting: deque[asyncio.Future[ReplicaProcess]] = deque()
        self._failures = 0
        self._is_draining = False
        self._idle: asyncio.Future[None] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_ongoing(self) -> int:
        return sum(replica.num_ongoing for replica in self.replicas)

    @property
    def is_ready(self) -> bool:
        return not self._is_draining and any(not replica.is_unhealthy for replica in self.replicas)

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def has_room(self) -> bool:
        """Whether `lease` would not wait."""
        return self._is_draining or (not self._waiting and self._free() is not None)

    async def lease(self) -> ReplicaLease:
        """A place, after waiting for one in turn.

        Raises: QueueFull if too many wait, AdmissionError if none comes in time, AppUnavailable if none will, Draining.
        Cancellation: what was waited for goes to the next.
        """
        if self._is_draining:
            raise Draining("This server is going away.", retry_after_s=DRAIN_RETRY_S)
        replica = None if self._waiting else self._free()
        if replica is None:
            replica = await self._wait()
        else:
            replica.num_ongoing += 1
        return ReplicaLease(self, replica)

    async def _wait(self) -> ReplicaProcess:
        if not self.replicas and self._failures >= _HOPELESS:
            raise AppUnavailable("The app cannot be started; the log says why.", retry_after_s=_MAX_BACKOFF_S)
        if len(self._waiting) >= self.options.max_queued_requests:
            config = self.options.backpressure_config
            full = QueueFull("Too many requests are waiting for this app.", retry_after_s=config.retry_after_s)
            full.status = config.status_code
            raise full
        place: asyncio.Future[ReplicaProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            async with asyncio.timeout(self._queue_s):
                return await place
        except BaseException as left:
            if place in self._waiting:
                self._waiting.remove(place)
            elif place.done() and not place.cancelled() and place.exception() is None:
                self._returned(place.result())  # it came, and nobody was there any more
            if not isinstance(left, TimeoutError):
                raise
            error = AdmissionError(f"No process was free within {self._queue_s:g} s.", retry_after_s=5.0)
            error.status, error.code = 503, "queue_timeout"
            raise error from None

    def _free(self) -> ReplicaProcess | None:
        """The process that has the least to do, or None while none has room. A process that is unhealthy has no room
        while another is healthy."""
        usable = [one for one in self.replicas if not one.link.is_lost]
        healthy = [one for one in usable if not one.is_unhealthy]
        free = [one for one in healthy or usable if one.num_ongoing < self.options.max_ongoing_requests]
        return min(free, key=lambda one: one.num_ongoing, default=None)

    def _returned(self, replica: ReplicaProcess) -> None:
        replica.num_ongoing -= 1
        self._hand_out()
        if self._idle is not None and not self._idle.done() and not self.num_ongoing:
            self._idle.set_result(None)

    def _hand_out(self) -> None:
        """Call this whenever a process may have room that it had not before."""
        while self._waiting and (replica := self._free()) is not None:
            place = self._waiting.popleft()
            if not place.done():
                replica.num_ongoing += 1
                place.set_result(replica)

    async def drained(self) -> None:
        """Take nobody in any more, and return when nobody is left."""
        self._is_draining = True
        if self.num_ongoing:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle

    # Keeping them running

    @asynccontextmanager
    async def running(self, first: ReplicaProcess | None = None) -> AsyncIterator[None]:
        """All processes up. Leaving it stops them.

        Raises: BootError if one does not start.
        """
        started: list[ReplicaProcess] = []
        keepers: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as group:
                boots = [
                    group.create_task(self._boot(first if number == 0 else None, started))
                    for number in range(self.options.num_replicas)
                ]
            self.replicas.extend(boot.result() for boot in boots)
            self._hand_out()  # constructors of others may have called already
            async with asyncio.TaskGroup() as group:
                keepers += [group.create_task(self._keep(replica, started)) for replica in list(self.replicas)]
                try:
                    yield
                finally:
                    for keeper in keepers:
                        keeper.cancel()
        finally:
            self._is_draining = True
            self._refuse_waiting(Draining("This server is going away.", retry_after_s=DRAIN_RETRY_S))
            await self._stop(started)
            self.replicas.clear()

    async def _stop(self, replicas: list[ReplicaProcess]) -> None:
        within_s = self.options.graceful_shutdown_timeout_s
        async with asyncio.TaskGroup() as group:
            hurry = group.create_task(self._hurrying.wait())
            stops = [group.create_task(replica.stop(within_s=within_s)) for replica in replicas]
            all_stopped = asyncio.gather(*stops)
            either: list[asyncio.Future[Any]] = [hurry, all_stopped]  # Any: their results differ
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            for replica in replicas:
                replica.link.abort()  # ends the wait for a teardown

    async def _boot(self, replica: ReplicaProcess | None, started: list[ReplicaProcess]) -> ReplicaProcess:
        """A process that can be asked; of one that was given, the import is done. Raises: BootError."""
        is_new = replica is None
        if replica is None:
            replica = await ReplicaProcess.start(
                self._opened, log_level=self._target.log_level, python=self._target.python
            )
        started.append(replica)
        try:
            if is_new:
                await replica.describe(self._target, within_s=self._load_s)
            assignment = Assignment(self.options.name, self.options, self._root_path)
            await replica.become(assignment, within_s=self._load_s)
        except BaseException:
            started.remove(replica)
            await replica.kill()
            raise
        return replica

    async def _keep(self, replica: ReplicaProcess, started: list[ReplicaProcess]) -> None:
        """Watch a process, and start another in its place, until cancelled."""
        while True:
            reason = await self._until_lost(replica)
            self.replicas.remove(replica)
            self._hand_out()  # without it, an unhealthy one may be the best that is left
            started.remove(replica)
            self.num_restarts += 1
            logger.error("%s: its process is lost (%s); starting another.", self.options.name, reason)
            await replica.kill()
            replica = await self._another(started)
            self._failures = 0
            self.replicas.append(replica)
            self._hand_out()

    async def _another(self, started: list[ReplicaProcess]) -> ReplicaProcess:
        while True:
            try:
                return await self._boot(None, started)
            except BootError as error:
                self._failures += 1
                logger.error("%s: %s\n%s", self.options.name, error.message, error.traceback)
                if self._failures >= _HOPELESS:
                    unavailable = AppUnavailable("The app cannot be started; the log says why.", retry_after_s=5.0)
                    if not self.replicas:
                        self._refuse_waiting(unavailable)
                await asyncio.sleep(min(_MAX_BACKOFF_S, 0.5 * 2 ** min(self._failures, 6)))

    def _refuse_waiting(self, error: TailraceError) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_exception(error)

    async def _until_lost(self, replica: ReplicaProcess) -> str:
        """Why it is of no use any more."""
        options, num_bad, told = self.options, 0, ""
        while True:
            await asyncio.wait([replica.gone], timeout=options.health_check_period_s)
            if replica.gone.done():
                return await replica.why()
            failure = await replica.check(within_s=options.health_check_timeout_s)
            if replica.gone.done():
                return await replica.why()
            replica.is_unhealthy = failure is not None
            self._hand_out()
            if failure is None:
                num_bad, told = 0, ""
                continue
            num_bad += 1
            if failure.message != told:
                logger.warning("%s: %s", options.name, f"{failure.message}\n{failure.traceback}".rstrip())
                told = failure.message
            if num_bad >= _UNHEALTHY:
                return f"unhealthy {_UNHEALTHY} times in a row"


@dataclass(frozen=True, slots=True)
class HostedApp:
    """An app, and the pools of its deployments; `ingress` is the one that the web reaches."""

    name: str
    route_prefix: str  # "" for the root, else "/something"
    pools: dict[str, Pool]
    is_resumable: bool = False  # whether its streamed answers are recorded

    @property
    def ingress(self) -> Pool:
        return self.pools[next(reversed(self.pools))]
