"""One request for vectors in progress: its wait in the queue, its sequences on the engine, its end.

It is no stream: nothing of it is kept, and nobody can follow it. When the engine dies, it waits for the next one, goes
through the queue again, and what has no vector yet runs again. Before, its texts may be tried alone (`vector_trials`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Protocol

from tailrace.admission import Gate, QueueEntry
from tailrace.engines.interface import Delta, Prefill, Sequence
from tailrace.engines.worker_process import Receiver
from tailrace.errors import (
    EngineError,
    EngineLost,
    QueueTimeout,
    RequestRefused,
    SequenceFailed,
    TailraceError,
)
from tailrace.generation.observers import Observers, Times
from tailrace.streams import StreamLog
from tailrace.types import End, Failure, Record, Usage, VectorForm, Vectors

__all__ = ["VectorRun"]


class SequencesRunner(Protocol):
    """The part of the engine's supervisor that a request for vectors needs."""

    def submit_all(self, sequences: Many[Sequence], receiver: Receiver) -> None: ...
    def abort(self, sequence_id: int) -> None: ...


_MOST_LOSSES = 3  # engines that died with sequences of this request
_AHEAD_TOKENS = 512  # on the engine at once: two of its steps, so that it never waits and other requests get their turn


class VectorRun:
    """Gets a vector for each prompt of a record. It implements `engines.Receiver` for all its sequences."""

    def __init__(
        self,
        record: Record,
        form: VectorForm,
        times: Times,
        *,
        gate: Gate,
        engine: SequencesRunner,
        new_sequence_id: Callable[[], int],
        observers: Observers,
        on_lost: Callable[[VectorRun, Many[int]], None],
        on_end: Callable[[VectorRun], None],
    ) -> None:
        """`on_lost` gets the indexes of the prompts that were on an engine when it died, also after the end."""
        self.record = record
        self.times = times
        self.cut_to_tokens: int | None = None  # the most tokens of an input, if one had more and was cut
        self._on_lost = on_lost
        self._on_end = on_end
        self._form = form
        self._gate = gate
        self._engine = engine
        self._new_sequence_id = new_sequence_id
        self._observers = observers
        self._vectors: dict[int, bytes] = {}  # by the index of the prompt
        self._left: deque[int] = deque()  # prompts that are not on the engine yet
        self._on_engine: dict[int, int] = {}  # sequences, and the indexes of their prompts
        self._ahead_tokens = 0
        self._entry: QueueEntry | None = None
        self._queue_s = 0.0
        self._is_slowed = False  # its caller repeatedly crashes engines
        self._done: asyncio.Future[tuple[bytes, ...]] = asyncio.get_running_loop().create_future()

    @staticmethod
    def demand(record: Record) -> int:
        """Return how many tokens a request has on the engine at once."""
        longest = max(prompt.num_tokens for prompt in record.prompts)
        return min(record.num_prompt_tokens, max(longest, _AHEAD_TOKENS))

    def sequence(self, sequence_id: int, index: int) -> Sequence:
        """Return a sequence that makes the vector of one prompt."""
        return Sequence(sequence_id, self.record.prompts[index].segments, vector=self._form)

    def enter(self, *, queue_s: float, is_slowed: bool) -> None:
        """Queue this request for at most `queue_s`. Call `result` next. Call `Gate.check` immediately before."""
        self._queue_s = queue_s
        self._is_slowed = is_slowed
        self.times.entered_s = time.monotonic()
        self._enter()

    async def result(self) -> Vectors:
        """Return the vectors.

        *Cancellation:* takes its sequences off the engine.
        *Raises:* QueueTimeout, EngineError, RequestRefused; the error that it was ended with.
        """
        end = End("cancelled", Usage(self.record.num_prompt_tokens, 0))
        try:
            vectors = await self._done
            end = End("done", end.usage)
        except TailraceError as error:
            end = End("error", Usage(0, 0), Failure(error.code, error.message))
            raise
        finally:
            self.times.ended_s = time.monotonic()
            for sequence_id in self._on_engine:
                self._engine.abort(sequence_id)
            self._leave()
            self._on_end(self)
            self._observers.on_end(self.record, StreamLog(self.record, [end]), self.times)
        num_tokens = tuple(prompt.num_tokens for prompt in self.record.prompts)
        arrived_s, admitted_s, ended_s = self.times.arrived_s, self.times.admitted_s, self.times.ended_s
        assert admitted_s is not None
        return Vectors(vectors, num_tokens, admitted_s - arrived_s, ended_s - arrived_s)

    @property
    def is_over(self) -> bool:
        return self._done.done()

    def fail(self, error: TailraceError) -> None:
        """End it. Does nothing if it has ended."""
        if not self._done.done():
            self._done.set_exception(error)

    # The queue

    def _enter(self) -> None:
        self._entry = QueueEntry(
            self.demand(self.record),
            1,
            self._start,
            owner=self.record.owner,
            is_slowed=self._is_slowed,
            is_background=self.record.is_background,
            queue_s=self._queue_s,
            expire=self._expire if not self.record.is_background else None,
        )
        self._gate.enter(self._entry)

    def _expire(self) -> None:
        self.fail(QueueTimeout("The model was too busy to begin this request in time."))

    def _leave(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._gate.leave(entry)

    def _start(self) -> None:
        if self.times.admitted_s is None:
            self.times.admitted_s = time.monotonic()
            self._observers.on_admitted(self.record, self.times)
        self._left = deque(index for index in range(len(self.record.prompts)) if index not in self._vectors)
        self._submit()

    def resume(self) -> None:
        """An engine is ready. Queue this request again if it has lost its engine."""
        if self._entry is None and not self._done.done():
            self._enter()

    # Calls from the engine (engines.Receiver)

    def push(self, delta: Delta) -> None:
        index = self._on_engine.pop(delta.sequence_id, None)
        if index is None or self._done.done():
            return
        self._ahead_tokens -= self.record.prompts[index].num_tokens
        if delta.finish_reason == "error":
            self._fail_sequence(delta)
            return
        if self.times.first_s is None:
            self.times.first_s = time.monotonic()
            self._observers.on_first_token(self.record, self.times)
        self._vectors[index] = delta.vector
        if len(self._vectors) == len(self.record.prompts):
            self._done.set_result(tuple(self._vectors[index] for index in range(len(self._vectors))))
        else:
            self._submit()

    def report(self, progress: Prefill) -> None:
        """Nobody reads how far a text is read."""

    def lost(self, error: EngineError) -> None:
        """The engine died. This is called for each sequence that it had."""
        lost = sorted(self._on_engine.values())
        if not lost:
            return
        self._on_engine.clear()
        self._leave()
        self.times.num_losses += 1
        self._on_lost(self, lost)
        if self.times.num_losses == _MOST_LOSSES:
            self.fail(EngineLost(f"{error.message} {_MOST_LOSSES} engines had begun this request."))

    def _submit(self) -> None:
        """Submit prompts until enough are on the engine."""
        if not self._on_engine:
            self._ahead_tokens = 0
        chosen: dict[int, Sequence] = {}  # by the index of the prompt
        while self._left:
            prompt = self.record.prompts[self._left[0]]
            if (self._on_engine or chosen) and self._ahead_tokens + prompt.num_tokens > _AHEAD_TOKENS:
                break
            index = self._left.popleft()
            chosen[index] = self.sequence(self._new_sequence_id(), index)
            self._ahead_tokens += prompt.num_tokens
        if not chosen:
            return
        try:
            self._engine.submit_all(list(chosen.values()), self)
        except EngineLost:  # it has just died: `lost` follows for what is on it
            if not self._on_engine:
                self._leave()
            return
        self._on_engine |= {sequence.sequence_id: index for index, sequence in chosen.items()}

    def _fail_sequence(self, delta: Delta) -> None:
        reason = f"The engine ended this sequence: {delta.failure}."
        if delta.is_refused:
            self.fail(RequestRefused(f"The engine refused this request: {delta.failure}."))
        else:
            self.fail(EngineLost(reason) if delta.is_lost else SequenceFailed(reason))
