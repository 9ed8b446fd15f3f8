"""Starts a worker, runs sequences on it, kills it, and starts the next one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from random import Random

from tailrace.engines import EngineSpec, Supervisor
from tailrace.engines.promise import Capabilities, Delta, Sequence
from tailrace.engines.schedule import FREE, Schedule
from tailrace.errors import EngineError, EngineLost, ModelError
from tailrace.measure.certify.situations import Company
from tailrace.types import Sampling

__all__ = ["Lives", "SequenceTranscript"]


class SequenceTranscript:
    """The ids of one sequence. A `Receiver`."""

    def __init__(self, prompt_ids: tuple[int, ...], sampling: Sampling, replayed: Schedule = FREE) -> None:
        self.prompt_ids = prompt_ids
        self.sampling = sampling
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


class Lives:
    """Runs one worker at a time, and restarts it after every kill."""

    def __init__(self, spec: EngineSpec) -> None:
        self._ready = asyncio.Event()
        self._supervisor = Supervisor(spec, on_change=self._on_change)
        self._life: asyncio.Task[None] | None = None
        self._sequence_ids = count(1)

    @classmethod
    @asynccontextmanager
    async def begin(cls, spec: EngineSpec) -> AsyncIterator[Lives]:
        """Start the first worker. Raises: ModelError if the engine cannot load the model."""
        lives = cls(spec)
        try:
            await lives._start()
            yield lives
        finally:
            await lives._end()

    @property
    def capabilities(self) -> Capabilities:
        assert self._supervisor.capabilities is not None
        return self._supervisor.capabilities

    def submit(self, answer: SequenceTranscript) -> int:
        """Raises: ModelError if the worker was lost."""
        sequence_id = next(self._sequence_ids)
        sequence = Sequence(sequence_id, answer.prompt_ids, answer.sampling, answer.replayed)
        try:
            self._supervisor.submit(sequence, answer)
        except EngineLost as error:
            raise ModelError(self._supervisor.last_reason or error.message) from error
        return sequence_id

    async def kill(self) -> None:
        """Kill the worker with SIGKILL at any point, and start the next one. Raises: ModelError if the worker was lost
        before, or the next one does not start."""
        if self._supervisor.pid is None:
            raise ModelError(self._supervisor.last_reason)
        assert self._life is not None
        os.kill(self._supervisor.pid, signal.SIGKILL)
        await self._life
        await self._start()

    async def run(
        self, answers: Iterable[SequenceTranscript], company: Company, draw: Random, strangers: list[SequenceTranscript]
    ) -> None:
        """Submit sequences in the way that `company` names; returns when all are submitted.

        Replays that need steps of their own come first, as in the server. With "changing", sequences of `strangers` run
        next to them, of which about half are aborted early. With "visited", they run next to a single sequence, one
        after the other with pauses.
        """
        for answer in sorted(answers, key=lambda answer: not answer.replayed.alone_end):
            self.submit(answer)
            if company == "changing":
                await answer.reach(draw.randint(0, 3))
                if strangers and draw.random() < 0.5:
                    await self._visit(strangers.pop(), draw)
            while company == "visited" and strangers and not answer.is_over:
                await answer.reach(len(answer.ids) + draw.randint(0, 6))
                await self._visit(strangers.pop(), draw)

    async def _visit(self, stranger: SequenceTranscript, draw: Random) -> None:
        """Submit a sequence, and abort it early in about half of the cases."""
        sequence_id = self.submit(stranger)
        if draw.random() < 0.5:
            await stranger.reach(draw.randint(0, 2))
            self._supervisor.abort(sequence_id)

    async def _start(self) -> None:
        self._ready.clear()
        self._life = asyncio.create_task(self._supervisor.run(once=True))
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait([ready, self._life], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not self._supervisor.is_ready:
            raise ModelError(self._supervisor.last_reason)

    async def _end(self) -> None:
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait([self._life])

    def _on_change(self) -> None:
        if self._supervisor.is_ready:
            self._ready.set()


def again(answer: SequenceTranscript) -> SequenceTranscript:
    """Return a replay of the sequence from its beginning."""
    return SequenceTranscript(answer.prompt_ids, answer.sampling, answer.schedule)


def from_there(answer: SequenceTranscript) -> SequenceTranscript:
    """Return a sequence that continues after all tokens so far."""
    left = (answer.sampling.max_tokens or 0) - len(answer.ids)
    return SequenceTranscript((*answer.prompt_ids, *answer.ids), replace(answer.sampling, max_tokens=left))
