"""Starts a worker, runs sequences on it, kills it, and starts the next one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import count
from random import Random

from msgspec.structs import replace

from tailrace.engines import EngineSpec
from tailrace.engines.interface import Capabilities, Delta, Prefill, Sequence
from tailrace.engines.schedule import FREE, Schedule
from tailrace.engines.supervisor import Supervisor
from tailrace.errors import EngineError, EngineLost, ModelError
from tailrace.types import Sampling
from tailrace_outer.measure.certify.situations import Company

__all__ = ["RestartedWorker", "SequenceTranscript"]


class SequenceTranscript:
    """The ids of one sequence. A `Receiver`."""

    def __init__(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, replayed: Schedule = FREE, adapter: str = ""
    ) -> None:
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.adapter = adapter
        self.replayed = replayed  # what a replay has to repeat
        self.deltas: list[tuple[int, bool]] = []  # numbers of tokens, and whether they were computed alone
        self.ids: list[int] = []
        self.failure = ""
        self.loss: EngineError | None = None  # the worker was lost before the sequence had ended
        self.is_over = False
        self.moved = asyncio.Event()

    def push(self, delta: Delta) -> None:
        self.ids += delta.token_ids
        self.deltas.append((len(delta.token_ids), delta.is_alone))
        self.failure = delta.failure
        self.is_over = delta.finish_reason is not None
        self.moved.set()

    def report(self, progress: Prefill) -> None:
        pass

    def lost(self, error: EngineError) -> None:
        self.loss = error
        self.moved.set()

    @property
    def schedule(self) -> Schedule:
        return Schedule.of(self.deltas)

    async def reach(self, num_tokens: int) -> None:
        """Wait until the sequence has `num_tokens` tokens or has ended. Raises: ModelError if it failed, or its worker
        was lost."""
        while len(self.ids) < num_tokens and not self.is_over:
            if self.loss is not None:
                raise ModelError(self.loss.message)
            self.moved.clear()
            await self.moved.wait()
        if self.failure:
            raise ModelError(f"The engine failed a sequence: {self.failure}.")


class RestartedWorker:
    """Runs one worker at a time, and restarts it after every kill."""

    def __init__(self, spec: EngineSpec) -> None:
        self._ready = asyncio.Event()
        self._supervisor = Supervisor(spec, on_change=self._on_change)
        self._running: asyncio.Task[None] | None = None
        self._sequence_ids = count(1)

    @classmethod
    @asynccontextmanager
    async def begin(cls, spec: EngineSpec) -> AsyncIterator[RestartedWorker]:
        """Start the first worker. Raises: ModelError if the engine cannot load the model."""
        worker = cls(spec)
        try:
            await worker._start()
            yield worker
        finally:
            await worker._end()

    @property
    def capabilities(self) -> Capabilities:
        assert self._supervisor.capabilities is not None
        return self._supervisor.capabilities

    def submit(self, answer: SequenceTranscript) -> int:
        """Raises: ModelError if the worker was lost."""
        sequence_id = next(self._sequence_ids)
        sequence = Sequence(sequence_id, (answer.prompt_ids,), answer.sampling, answer.replayed, answer.adapter)
        try:
            self._supervisor.submit(sequence, answer)
        except EngineLost as error:
            raise ModelError(self._supervisor.last_reason or error.message) from error
        return sequence_id

    async def kill(self) -> None:
        """Kill the worker with SIGKILL at any point, and start the next one. Raises: ModelError if the worker was lost
        before, or the next one does not start."""
        assert self._running is not None
        pid, is_killed = self._supervisor.pid, False
        with contextlib.suppress(ProcessLookupError):  # it has just died by itself
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                is_killed = True
        await self._running
        if not is_killed:
            raise ModelError(self._supervisor.last_reason)
        await self._start()

    async def run(
        self,
        answers: Iterable[SequenceTranscript],
        company: Company,
        draw: Random,
        neighbours: list[SequenceTranscript],
    ) -> None:
        """Submit sequences in the way that `company` names; returns when all are submitted.

        Replays that need steps of their own come first, as in the server. With "changing", `neighbours` run next to
        them, of which about half are aborted early. With "visited", they run next to a single sequence, one after the
        other with pauses.
        """
        for answer in sorted(answers, key=lambda answer: not answer.replayed.alone_end):
            self.submit(answer)
            if company == "changing":
                await answer.reach(draw.randint(0, 3))
                if neighbours and draw.random() < 0.5:
                    await self._visit(neighbours.pop(), draw)
            while company == "visited" and neighbours and not answer.is_over:
                await answer.reach(len(answer.ids) + draw.randint(0, 6))
                await self._visit(neighbours.pop(), draw)

    async def _visit(self, neighbour: SequenceTranscript, draw: Random) -> None:
        """Submit a sequence, and abort it early in about half of the cases."""
        sequence_id = self.submit(neighbour)
        if draw.random() < 0.5:
            await neighbour.reach(draw.randint(0, 2))
            self._supervisor.abort(sequence_id)

    async def _start(self) -> None:
        self._ready.clear()
        self._running = asyncio.create_task(self._supervisor.run(once=True))
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait([ready, self._running], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not self._supervisor.is_ready:
            raise ModelError(self._supervisor.last_reason)

    async def _end(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    def _on_change(self) -> None:
        if self._supervisor.is_ready:
            self._ready.set()


def replay_of(answer: SequenceTranscript) -> SequenceTranscript:
    """Return a replay of the sequence from its beginning."""
    return SequenceTranscript(answer.prompt_ids, answer.sampling, answer.schedule, answer.adapter)


def continuation_of(answer: SequenceTranscript) -> SequenceTranscript:
    """Return a sequence that continues after all tokens so far."""
    left = (answer.sampling.max_tokens or 0) - len(answer.ids)
    sampling = replace(answer.sampling, max_tokens=left)
    return SequenceTranscript((*answer.prompt_ids, *answer.ids), sampling, adapter=answer.adapter)
