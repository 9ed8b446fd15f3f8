"""Keeps an engine worker running: starts it, sends it sequences, detects crashes and hangs, and restarts it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

from tailrace.engines.interface import Capabilities, Sequence, Sight
from tailrace.engines.kinds import all_kinds
from tailrace.engines.protocol import Abort, EngineSpec
from tailrace.engines.worker_process import Receiver, WorkerProcess
from tailrace.errors import EngineError, EngineLost, EngineStalled

__all__ = ["Supervisor"]

logger = logging.getLogger("tailrace.engine")

_SPARE_AFTER_S = 5.0  # resumed streams catch up first, before loading the spare takes the CPU
_EMPTY_FRAMES = 10  # a prefill without progress gives frames without tokens: their timeout is this many times longer
_RECHECK_S = 0.02
_LOOK_S = 1.0  # a new timeout is in use so much later
_MIN_LIFE_S = 5.0  # a worker that dies earlier, without a token, counts as a failed start


class Supervisor:
    """Keeps one engine worker running, and passes its deltas to the sequences' receivers.

    `on_change` is called on the event loop when an engine becomes ready or is lost, before the receivers are called.
    `capabilities` keep their value while a worker is replaced. With `spare`, the next worker is loaded in advance,
    which doubles the memory.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        on_change: Callable[[], None] = lambda: None,
        stall_s: float = 30.0,
        load_s: float = 600.0,
        spare: bool = False,
    ) -> None:
        self.spec = spec
        self.capabilities: Capabilities | None = None
        self.is_ready = False
        self.failures = 0  # failed starts in a row, including workers that died early
        self.restarts = 0
        self.last_reason = ""
        self.has_crashed = False  # whether the last engine crashed or hung, and was not killed
        self.pid: int | None = None
        self.loop: asyncio.AbstractEventLoop | None = None  # on which it runs
        self._on_change = on_change
        self.stall_s = stall_s
        self.load_s = load_s
        self._wants_spare = spare
        kind = all_kinds().get(spec.engine)
        self._may_be_silent = kind is not None and kind.may_be_silent
        self._epoch = 0
        self._lost_s: float | None = None  # when the engine was lost; None while one runs
        self._worker: WorkerProcess | None = None
        self._spare: asyncio.Task[WorkerProcess | None] | None = None
        self._spare_timer: asyncio.TimerHandle | None = None
        self._receivers: dict[int, Receiver] = {}

    @property
    def num_sequences(self) -> int:
        return len(self._receivers)

    @property
    def is_exact(self) -> bool:
        """Whether a sequence that runs again gives the same ids."""
        return self.capabilities is not None and self.capabilities.exact

    @property
    def silent_s(self) -> float:
        """Seconds since the last token, read or generated, while sequences run; 0 for engines that may be silent."""
        if self._may_be_silent or not self._receivers or self._worker is None:
            return 0.0
        return time.monotonic() - self._worker.last_token_s

    @property
    def retry_after_s(self) -> float:
        """Backoff of restarts, in seconds; also the Retry-After while no engine runs."""
        return min(30.0, 0.5 * (1 << min(self.failures, 6)))

    def submit(self, sequence: Sequence, receiver: Receiver) -> None:
        """Send a sequence to the worker. Raises: EngineLost if no worker is ready."""
        self.submit_all([sequence], receiver)

    def submit_all(self, sequences: Many[Sequence], receiver: Receiver) -> None:
        """Send sequences to the worker in one message, so that its next step has all of them.

        Raises: EngineLost if no worker is ready.
        """
        worker = self._worker
        if not self.is_ready or worker is None or worker.gone.done():
            raise EngineLost("The engine is not running.", retry_after_s=self.retry_after_s)
        worker.expect_progress()
        self._receivers.update((sequence.sequence_id, receiver) for sequence in sequences)
        worker.submit(sequences)

    def abort(self, sequence_id: int) -> None:
        """Abort a sequence. Its receiver still gets the last delta, within one step."""
        worker = self._worker
        if sequence_id in self._receivers and worker is not None:
            worker.send(Abort(sequence_id))

    async def see(self, image: bytes) -> Sight:
        """Return how an image is written in a prompt.

        Raises: RequestRefused if the model cannot read it, EngineLost if no worker is ready or it is lost, with
        `is_crash` if that was while it read the image.
        """
        if not self.is_ready or self._worker is None:
            raise EngineLost("The engine is not running.", retry_after_s=self.retry_after_s)
        return await self._worker.see(image)

    async def run(self, *, once: bool = False) -> None:
        """Run a worker, and restart it whenever it is lost, until cancelled. With `once`, return at the first loss.

        May be called again after it has returned.

        Cancellation: kills the worker and waits for its end. Receivers are not called, so there should be no sequences.
        """
        self.loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:  # of the spare
                await self._run(group, once=once)
        finally:
            self.is_ready = False
            if self._spare_timer is not None:
                self._spare_timer.cancel()
            spare, self._spare = self._spare, None
            if spare is not None and not spare.cancelled() and (worker := spare.result()) is not None:
                await worker.stop()

    async def _run(self, group: asyncio.TaskGroup, *, once: bool) -> None:
        while True:
            error = await self._run_worker(group)
            self._report(error)
            if once:
                if self._spare is not None:
                    self._spare.cancel()
                return
            self.restarts += 1
            has_worked = self.capabilities is not None
            if self.failures > has_worked:  # an engine that has worked before gets one restart without backoff
                await asyncio.sleep(self.retry_after_s)

    def _report(self, error: EngineError) -> None:
        was_ready, self.is_ready = self.is_ready, False
        self.last_reason = error.message
        if was_ready:
            self._lost_s = time.monotonic()
            self.has_crashed = not (isinstance(error, EngineLost) and not error.is_crash)
        self._on_change()
        lost, self._receivers = list(self._receivers.values()), {}
        if was_ready:
            logger.error("%s Interrupted sequences: %d. Starting another engine.", error.message, len(lost))
        for receiver in lost:
            receiver.lost(error)

    async def _run_worker(self, group: asyncio.TaskGroup) -> EngineError:
        """Run one worker to its end; returns why it ended. Loads the spare meanwhile, if one is wanted."""
        worker = await self._take_spare()
        try:
            if worker is None:
                worker = await self._load()
            self.capabilities = worker.ready.result()
            self.pid = worker.process.pid
            worker.receivers = self._receivers
            self._worker = worker
            self.is_ready = True
            if self._lost_s is not None:
                logger.warning("Another engine is ready after %.1f s.", time.monotonic() - self._lost_s)
                self._lost_s = None
            self._on_change()
            if self._wants_spare:
                self._plan_spare(group)
            return await self._serve(worker)
        except EngineLost as error:
            self.failures += 1
            return error
        finally:
            self.pid = None
            self._worker = None
            if worker is not None:
                await worker.stop()

    async def _load(self) -> WorkerProcess:
        """Start a worker and wait until its model is loaded. Raises: EngineLost."""
        load_s = self.load_s  # it may be changed meanwhile
        self._epoch += 1
        worker = await WorkerProcess.start(self.spec, self._epoch)
        try:
            first: list[asyncio.Future[Any]] = [worker.ready, worker.gone]  # Any: their results differ
            await asyncio.wait(first, timeout=load_s, return_when=asyncio.FIRST_COMPLETED)
            if not worker.ready.done():
                if not worker.gone.done():
                    raise EngineLost(f"The engine did not load within {load_s:g} s.")
                raise EngineLost(f"The engine did not load: {(await worker.exit_reason())[0].rstrip('.')}.")
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def _serve(self, worker: WorkerProcess) -> EngineError:
        """Wait until the worker is lost, and count an early death as a failure. Returns the error."""
        since_s = time.monotonic()
        error = await self._until_lost(worker)
        is_short = time.monotonic() - since_s < _MIN_LIFE_S and not worker.has_given
        self.failures = self.failures + 1 if is_short else 0
        return error

    def _plan_spare(self, group: asyncio.TaskGroup) -> None:
        def begin() -> None:
            self._spare = group.create_task(self._load_spare())

        self._spare_timer = asyncio.get_running_loop().call_later(_SPARE_AFTER_S, begin)

    async def _load_spare(self) -> WorkerProcess | None:
        try:
            return await self._load()
        except EngineLost as error:
            logger.error("%s There is no spare engine.", error.message)
            return None

    async def _take_spare(self) -> WorkerProcess | None:
        """Return the spare worker, or None. Waits for a spare that is still loading, since a new one would take
        longer."""
        if self._spare_timer is not None:
            self._spare_timer.cancel()
        loading, self._spare = self._spare, None
        spare = await loading if loading is not None else None
        if spare is not None and spare.gone.done():
            logger.error("The spare engine had stopped as well: %s.", (await spare.exit_reason())[0])
            await spare.stop()
            return None
        return spare

    async def _until_lost(self, worker: WorkerProcess) -> EngineError:
        is_suspect = False
        while not worker.gone.done():
            now_s = time.monotonic()
            idle_s = now_s - worker.last_frame_s
            if not self._may_be_silent:
                idle_s = max(idle_s, (now_s - worker.last_token_s) / _EMPTY_FRAMES)
            if worker.is_working and idle_s >= self.stall_s:
                if not is_suspect:  # maybe this process was blocked: read the pending frames first
                    is_suspect = True
                    await asyncio.sleep(_RECHECK_S)
                    continue
                silent_s = now_s - worker.last_token_s
                return EngineStalled(f"The engine made no progress for {silent_s:.0f} s and was replaced.")
            is_suspect = False
            wait_s = self.stall_s - idle_s if worker.is_working else self.stall_s
            await asyncio.wait([worker.gone], timeout=max(min(wait_s, _LOOK_S), 0.01))
        exit_reason, is_crash = await worker.exit_reason()
        return EngineLost(f"The engine stopped: {exit_reason}.", is_crash=is_crash)
