"""The engine side of a stream: which of its sequences the engine has, what it says of them, and how they run again."""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tailrace.engines import Receiver
from tailrace.engines.promise import Delta, Sequence
from tailrace.errors import Diverged, EngineError, EngineLost, JournalDamaged, LeaseLost, TailraceError
from tailrace.generation.blame import Culprit
from tailrace.generation.choice import Choice, Problem
from tailrace.generation.observers import Observers, Times
from tailrace.streams import Lease, LogStore, Record, StreamLog
from tailrace.types import Continuity, End, TextDelta

__all__ = ["EngineSide", "SequenceRunner"]

logger = logging.getLogger("tailrace.generation")

_SETTLED_TOKENS = 4  # from a slowed request, after which the next one may begin
_ages = itertools.count()


class SequenceRunner(Protocol):
    """The part of the engine's supervisor that a stream needs."""

    failures: int  # engines in a row that did not start, or did not last

    def submit(self, sequence: Sequence, receiver: Receiver) -> None: ...
    def abort(self, sequence_id: int) -> None: ...


class Rescuer(Protocol):
    """Who brings streams back when an engine dies under them."""

    def on_engine_lost(self, run: EngineSide) -> None:
        """The engine died with some of its sequences, which it still lists."""

    def on_suspended(self, run: EngineSide) -> None:
        """It waits to be resumed on another engine."""

    def on_progress(self, run: EngineSide) -> bool:
        """It is watched, and has a token more. Returns whether nobody needs to watch it any longer."""

    def on_released(self, run: EngineSide) -> None:
        """The engine is done with it. Not called for one that never was suspended."""


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class EngineSide(ABC):
    """Receives what the engine says of all sequences of one stream, and has it written.

    When the engine dies it is suspended: it keeps its place until it is resumed on another one, or ended.
    """

    lease: Lease
    choices: list[Choice]
    times: Times
    store: LogStore
    engine: SequenceRunner
    new_sequence_id: Callable[[], int]
    rescuer: Rescuer
    observers: Observers
    log: StreamLog = field(init=False)
    record: Record = field(init=False)  # with its prompts and caller, which the log forgets at its end
    age: int = field(init=False, default_factory=_ages.__next__)
    end: End | None = field(init=False, default=None)  # when it is decided; `log.end` is there when it can be read
    continuity: Continuity | None = field(init=False, default=None)
    is_handed_over: bool = field(init=False, default=False)  # another server writes the stream, or will
    is_suspended: bool = field(init=False, default=False)
    was_suspended: bool = field(init=False, default=False)  # at any time: the rescuer knows it
    is_watched: bool = field(init=False, default=False)  # whether somebody wants to know of its progress
    lost_at: int = field(init=False, default=-1)  # tokens that the last engine that died under it had given
    num_losses: int = field(init=False, default=0)  # engines in a row that died under it at that position
    num_kills: int = field(init=False, default=0)  # of those, engines that were killed from outside
    was_tried: bool = field(init=False, default=False)  # alone on an engine that lived; until it has made progress
    _on_engine: dict[int, Choice] = field(init=False, default_factory=dict)  # by the ids of their sequences

    def __post_init__(self) -> None:
        self.log = self.lease.log
        self.record = self.log.record

    @abstractmethod
    def fail(self, error: TailraceError) -> None:
        """End the stream with an error."""

    @abstractmethod
    def _on_lease_lost(self) -> None:
        """Another server writes the stream now."""

    @abstractmethod
    def _on_settled(self) -> None:
        """It has shown that it does no harm to the engine."""

    @abstractmethod
    def _end_if_complete(self) -> None:
        """A choice has its last event."""

    @abstractmethod
    def _release(self) -> None:
        """The engine is done with all sequences."""

    @property
    def num_generated(self) -> int:
        """How many tokens the engine has given of its sequences."""
        return sum(choice.num_generated for choice in self.choices)

    @property
    def culprit(self) -> Culprit:
        """What is to be blamed if it kills engines."""
        return Culprit.of_record(self.record)

    # What the engine says (engines.Receiver)

    def push(self, delta: Delta) -> None:
        outcome: tuple[TextDelta, ...] | Problem
        try:
            choice = self._on_engine[delta.sequence_id]
        except KeyError:
            return  # a sequence that was given up
        try:
            outcome = choice.take(delta)
        except Exception:  # a defect of ours must end this stream, not everybody's
            logger.exception("a delta could not be taken")
            outcome = Problem("failed", TailraceError("The server failed to read the engine's output."))
        is_last = delta.finish_reason is not None
        if is_last:
            self._leave_engine(choice)
        if isinstance(outcome, Problem):
            self._on_problem(choice, outcome)
        elif outcome:
            if self.times.first_s is None and self.continuity is None:  # else an earlier process had the first token
                self.times.first_s = self.log.first_s = time.monotonic()
                self.observers.on_first_token(self.record, self.times)
            if self.is_watched:
                self._on_watched_progress()
            is_complete = outcome[-1].finish_reason is not None
            if is_complete:
                choice.on_complete()
            if not self.is_handed_over:
                try:
                    self.store.append(self.lease, outcome)
                except LeaseLost:
                    self._on_lease_lost()
            if is_complete:
                if choice.is_on_engine:
                    self.engine.abort(choice.sequence.sequence_id)
                self._end_if_complete()
        if is_last and not self.is_suspended and not self._on_engine:
            self._release()

    def lost(self, error: EngineError) -> None:
        """The engine is gone. It says so for each sequence, all of which the first call attends to."""
        if not self._on_engine:
            return
        self.rescuer.on_engine_lost(self)
        for choice in list(self._on_engine.values()):
            self._leave_engine(choice)
        if all(choice.is_complete for choice in self.choices):
            self._release()
        else:
            self._suspend()

    def _on_watched_progress(self) -> None:
        is_through = self.rescuer.on_progress(self)
        is_settled = self.num_generated >= _SETTLED_TOKENS
        if is_settled:
            self._on_settled()
        self.is_watched = not (is_through and is_settled)

    def _on_problem(self, choice: Choice, problem: Problem) -> None:
        if problem.kind == "lost":
            self._retry(choice, problem)
        elif problem.kind == "diverged":
            self._continue_from_log(choice)
        else:
            self.fail(problem.error)

    # Running, and running again

    def resume(self, *, is_watched: bool = False) -> None:
        """Run again what is not complete, behind what the log has. With `is_watched` recovery hears of its progress."""
        self.is_suspended = False
        self.is_watched = self.is_watched or is_watched
        self.store.retract(self.lease)
        ids = self._delivered_ids()
        if self.continuity is None and any(ids):
            self.continuity = "replayed"
        complete = {event.choice for event in self.log.events if isinstance(event, TextDelta) and event.finish_reason}
        for choice in self.choices:
            if choice.index in complete:
                choice.on_complete()
            else:
                choice.reopen()
        running = [choice for choice in self.choices if not choice.is_complete]
        for choice in running:
            kept = self.log.reasoning(choice.index), self.log.text(choice.index)
            if choice.start_replay(ids[choice.index]) != kept:
                self.fail(JournalDamaged("What was kept of this stream does not fit together."))
                return
        self._submit(running)

    def restore(self) -> None:
        """Take over what the log has of an earlier process's work. If that was all, end it."""
        for choice, token_ids in zip(self.choices, self._delivered_ids(), strict=True):
            choice.restore(token_ids)
        for event in self.log.events:
            if isinstance(event, TextDelta) and event.finish_reason is not None:
                self.choices[event.choice].on_complete()
        self._end_if_complete()

    def _submit(self, choices: Iterable[Choice]) -> None:
        try:
            for choice in choices:
                self.engine.submit(choice.sequence, self)
                self._on_engine[choice.sequence.sequence_id] = choice
                choice.on_submit()
        except EngineLost:
            self._suspend()

    def _suspend(self) -> None:
        if not self.is_suspended:
            self.is_suspended = self.was_suspended = True
            self.times.num_losses += 1
            self.rescuer.on_suspended(self)

    def _leave_engine(self, choice: Choice) -> None:
        del self._on_engine[choice.sequence.sequence_id]
        choice.on_engine_done()

    def _retry(self, choice: Choice, problem: Problem) -> None:
        """What the engine ran a sequence on went away, and the engine is there: the sequence runs again."""
        self.store.flush()
        ids = self._delivered_ids()[choice.index]
        # While there is a write error, readers have less than was written.
        if not choice.may_retry() or len(ids) != choice.num_tokens:
            self.fail(problem.error)
            return
        if self.continuity is None:
            self.continuity = "replayed"
        choice.rename(self.new_sequence_id())
        choice.start_replay(ids)
        self._submit([choice])

    def _continue_from_log(self, choice: Choice) -> None:
        """A replay says something else than it said before."""
        record = self.record
        if record.exact:
            self.fail(Diverged("The answer came out differently after the engine was lost, and exactness was asked."))
        elif record.sampling.grammar is not None:
            # A grammar begins anew with a sequence: what would come is no continuation.
            self.fail(Diverged("The answer came out differently after the engine was lost; a grammar cannot go on."))
        else:
            self.continuity = "continued"
            if choice.is_on_engine:
                self.engine.abort(choice.sequence.sequence_id)
                self._leave_engine(choice)
            choice.continue_from(self.new_sequence_id(), self._delivered_ids()[choice.index])
            self._submit([choice])

    def _complete_all(self) -> None:
        """Nothing more is wanted of any choice."""
        for choice in self.choices:
            if not choice.is_complete:
                choice.on_complete()
                if choice.is_on_engine:
                    self.engine.abort(choice.sequence.sequence_id)

    def _delivered_ids(self) -> list[list[int]]:
        """The ids of each choice that are in the log, which is all that anybody may have seen."""
        ids: list[list[int]] = [[] for _ in range(self.record.num_choices)]
        for event in self.log.events:
            if isinstance(event, TextDelta):
                ids[event.choice] += event.token_ids
        return ids
