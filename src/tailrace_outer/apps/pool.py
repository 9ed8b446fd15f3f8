"""The processes of one deployment. Keeps them running, and assigns requests to them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tailrace.errors import SHUTTING_DOWN, AdmissionError, AppUnavailable, Draining, QueueFull, TailraceError
from tailrace_outer.apps.process import BootError, ReplicaProcess
from tailrace_outer.serve.boot import AppTarget, Assignment, Part
from tailrace_outer.serve.link import OnChannel

__all__ = ["DRAIN_RETRY_S", "HostedApp", "Pool", "ReplicaLease"]

logger = logging.getLogger("tailrace.apps")

_MAX_FAILED_STARTS = 3  # in a row; after that, requests no longer wait for a start
_MAX_FAILED_CHECKS = 3  # in a row; after that, the process is replaced
_MAX_BACKOFF_S = 30.0
DRAIN_RETRY_S = 5.0


class ReplicaLease:
    """One request slot of one process, until `release`."""

    __slots__ = ("_pool", "replica")

    def __init__(self, pool: Pool, replica: ReplicaProcess) -> None:
        self._pool = pool
        self.replica = replica

    def release(self) -> None:
        """Free the slot. A second call does nothing."""
        pool, self._pool = self._pool, None  # type: ignore[assignment]  # None once it is released
        if pool is not None:
            pool._release(self.replica)


class Pool:
    """Shares the processes of a deployment. Requests wait in order of arrival; each gets the process with the
    fewest."""

    def __init__(
        self,
        target: AppTarget,
        part: Part,
        *,
        root_path: str,
        load_s: float,
        queue_s: float,
        on_channel: OnChannel,
        force_stop: asyncio.Event,
    ) -> None:
        self.part = part
        self.options = part.options
        self.num_restarts = 0
        self.replicas: list[ReplicaProcess] = []  # those that accept requests
        self._target = target
        self._root_path = root_path
        self._load_s = load_s
        self._queue_s = queue_s
        self._on_channel = on_channel
        self._force_stop = force_stop  # set: stop without waiting for the user's teardown
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
        """Wait in the queue for a free slot, and take it.

        Raises: QueueFull; AdmissionError on a timeout; AppUnavailable if the app cannot be started; Draining.
        Cancellation: leaves the queue; a slot that was just assigned goes to the next request.
        """
        if self._is_draining:
            raise Draining(SHUTTING_DOWN, retry_after_s=DRAIN_RETRY_S)
        replica = None if self._waiting else self._free()
        if replica is None:
            replica = await self._wait()
        else:
            replica.num_ongoing += 1
        return ReplicaLease(self, replica)

    async def _wait(self) -> ReplicaProcess:
        if not self.replicas and self._failures >= _MAX_FAILED_STARTS:
            raise AppUnavailable("The app cannot be started; the server's log says why.", retry_after_s=_MAX_BACKOFF_S)
        if len(self._waiting) >= self.options.max_queued_requests:
            config = self.options.backpressure_config
            full = QueueFull("Too many requests are waiting for this app.", retry_after_s=config.retry_after_s)
            full.status = config.status_code
            raise full
        slot: asyncio.Future[ReplicaProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(slot)
        try:
            async with asyncio.timeout(self._queue_s):
                return await slot
        except BaseException as error_or_cancel:
            if slot in self._waiting:
                self._waiting.remove(slot)
            elif slot.done() and not slot.cancelled() and slot.exception() is None:
                self._release(slot.result())  # assigned at the same moment
            if not isinstance(error_or_cancel, TimeoutError):
                raise
            error = AdmissionError(f"No process was free within {self._queue_s:g} s.", retry_after_s=5.0)
            error.status, error.code = 503, "queue_timeout"
            raise error from None

    def _free(self) -> ReplicaProcess | None:
        """Return the process with the fewest requests, or None if all are full. Unhealthy processes count only if there
        is no healthy one."""
        usable = [one for one in self.replicas if not one.link.is_lost]
        healthy = [one for one in usable if not one.is_unhealthy]
        free = [one for one in healthy or usable if one.num_ongoing < self.options.max_ongoing_requests]
        return min(free, key=lambda one: one.num_ongoing, default=None)

    def _release(self, replica: ReplicaProcess) -> None:
        replica.num_ongoing -= 1
        self._assign_waiting()
        if self._idle is not None and not self._idle.done() and not self.num_ongoing:
            self._idle.set_result(None)

    def _assign_waiting(self) -> None:
        """Give free slots to waiting requests. Call this whenever a slot may have become free."""
        while self._waiting and (replica := self._free()) is not None:
            slot = self._waiting.popleft()
            if not slot.done():
                replica.num_ongoing += 1
                slot.set_result(replica)

    async def wait_drained(self) -> None:
        """Accept no new requests, and wait until all running ones have ended."""
        self._is_draining = True
        if self.num_ongoing:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle

    # Keeping them running

    @asynccontextmanager
    async def running(self, first: ReplicaProcess | None = None) -> AsyncIterator[None]:
        """Start all processes. Leaving the context stops them.

        Raises: BootError if one does not start.
        """
        started: list[ReplicaProcess] = []
        supervisors: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as group:
                boots = [
                    group.create_task(self._boot(first if number == 0 else None, started))
                    for number in range(self.options.num_replicas)
                ]
            self.replicas.extend(boot.result() for boot in boots)
            self._assign_waiting()  # constructors of other deployments may have called already
            async with asyncio.TaskGroup() as group:
                supervisors += [group.create_task(self._supervise(replica, started)) for replica in list(self.replicas)]
                try:
                    yield
                finally:
                    for supervisor in supervisors:
                        supervisor.cancel()
        finally:
            self._is_draining = True
            self._refuse_waiting(Draining(SHUTTING_DOWN, retry_after_s=DRAIN_RETRY_S))
            await self._stop(started)
            self.replicas.clear()

    async def _stop(self, replicas: list[ReplicaProcess]) -> None:
        within_s = self.options.graceful_shutdown_timeout_s
        async with asyncio.TaskGroup() as group:
            forced = group.create_task(self._force_stop.wait())
            stops = [group.create_task(replica.stop(within_s=within_s)) for replica in replicas]
            all_stopped = asyncio.gather(*stops)
            either: list[asyncio.Future[Any]] = [forced, all_stopped]  # Any: their results differ
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            forced.cancel()
            for replica in replicas:
                replica.link.abort()  # ends the wait for a teardown

    async def _boot(self, replica: ReplicaProcess | None, started: list[ReplicaProcess]) -> ReplicaProcess:
        """Return a process that accepts requests. A `replica` that is given has imported the app. Raises: BootError."""
        is_new = replica is None
        if replica is None:
            replica = await ReplicaProcess.start(
                self._on_channel, log_level=self._target.log_level, python=self._target.python
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

    async def _supervise(self, replica: ReplicaProcess, started: list[ReplicaProcess]) -> None:
        """Watch a process, and replace it when it dies, until cancelled."""
        while True:
            reason = await self._until_lost(replica)
            self.replicas.remove(replica)
            self._assign_waiting()  # without this process, an unhealthy one may be eligible
            started.remove(replica)
            self.num_restarts += 1
            logger.error("%s: its process is lost (%s); starting another.", self.options.name, reason)
            await replica.kill()
            replica = await self._restart(started)
            self._failures = 0
            self.replicas.append(replica)
            self._assign_waiting()

    async def _restart(self, started: list[ReplicaProcess]) -> ReplicaProcess:
        while True:
            try:
                return await self._boot(None, started)
            except BootError as error:
                self._failures += 1
                logger.error("%s: %s\n%s", self.options.name, error.message, error.traceback)
                if self._failures >= _MAX_FAILED_STARTS:
                    unavailable = AppUnavailable(
                        "The app cannot be started; the server's log says why.", retry_after_s=5.0
                    )
                    if not self.replicas:
                        self._refuse_waiting(unavailable)
                await asyncio.sleep(min(_MAX_BACKOFF_S, 0.5 * 2 ** min(self._failures, 6)))

    def _refuse_waiting(self, error: TailraceError) -> None:
        while self._waiting:
            slot = self._waiting.popleft()
            if not slot.done():
                slot.set_exception(error)

    async def _until_lost(self, replica: ReplicaProcess) -> str:
        """Wait until the process has died or is unhealthy. Returns the reason."""
        options, num_bad, last_message = self.options, 0, ""
        while True:
            await asyncio.wait([replica.exited], timeout=options.health_check_period_s)
            if replica.exited.done():
                return await replica.exit_reason()
            failure = await replica.check(within_s=options.health_check_timeout_s)
            if replica.exited.done():
                return await replica.exit_reason()
            replica.is_unhealthy = failure is not None
            self._assign_waiting()
            if failure is None:
                num_bad, last_message = 0, ""
                continue
            num_bad += 1
            if failure.message != last_message:
                logger.warning("%s: %s", options.name, f"{failure.message}\n{failure.traceback}".rstrip())
                last_message = failure.message
            if num_bad >= _MAX_FAILED_CHECKS:
                return f"unhealthy {_MAX_FAILED_CHECKS} times in a row"


@dataclass(frozen=True, slots=True)
class HostedApp:
    """An app and the pools of its deployments. `ingress` is the pool that HTTP requests go to."""

    name: str
    route_prefix: str  # "" for the root, else "/something"
    pools: dict[str, Pool]
    is_resumable: bool = False  # whether its streamed answers are recorded
    wire_prefix: str = ""  # below it, errors have the form of the wire that has these paths; "": nowhere

    @property
    def ingress(self) -> Pool:
        return self.pools[next(reversed(self.pools))]
