"""The engine side of a stream: which of its sequences the engine has, their deltas, and how they run again."""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tailrace.engines.interface import Delta, Prefill, Sequence
from tailrace.engines.worker_process import Receiver
from tailrace.errors import Diverged, EngineError, EngineLost, JournalDamaged, LeaseLost, TailraceError
from tailrace.generation.blame import Culprit
from tailrace.generation.choice import Choice, Problem
from tailrace.generation.observers import Observers, Times
from tailrace.streams import Lease, LogStore, Record, StreamLog
from tailrace.types import Continuity, End, PromptProgress, TextDelta

__all__ = ["EngineSide", "SequenceRunner"]

logger = logging.getLogger("tailrace.generation")

_PROGRESS_S = 0.25  # between two reports of how much of the prompts is read
_SETTLED_TOKENS = 4  # when a slowed request has as many tokens, the next one may start
_ages = itertools.count()


class SequenceRunner(Protocol):
    """The part of the engine's supervisor that a stream needs."""

    failures: int  # failed starts in a row, including engines that died early

    def submit(self, sequence: Sequence, receiver: Receiver) -> None: ...
    def abort(self, sequence_id: int) -> None: ...


class Rescuer(Protocol):
    """Resumes streams after their engine was lost."""

    def on_engine_lost(self, run: EngineSide) -> None:
        """The engine died while it ran sequences of this stream. The stream still lists them."""

    def on_suspended(self, run: EngineSide) -> None:
        """The stream waits to be resumed on another engine."""

    def on_progress(self, run: EngineSide) -> bool:
        """A watched stream has a new token. Returns whether it no longer needs to be watched."""

    def on_released(self, run: EngineSide) -> None:
        """The stream left the engine. Called only for streams that were suspended at some time."""


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class EngineSide(ABC):
    """Receives the deltas of all sequences of one stream, and appends their events to the log.

    When the engine dies, the stream is suspended: it keeps its slot until it is resumed on another engine, or ended.
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
    record: Record = field(init=False)  # keeps prompts and caller, which the log drops at its end
    age: int = field(init=False, default_factory=_ages.__next__)
    end: End | None = field(init=False, default=None)  # set when it is decided; `log.end` when it can be read
    continuity: Continuity | None = field(init=False, default=None)
    is_handed_over: bool = field(init=False, default=False)  # another server writes the stream, or will
    is_suspended: bool = field(init=False, default=False)
    was_suspended: bool = field(init=False, default=False)  # at some time: the rescuer has to hear of its release
    is_watched: bool = field(init=False, default=False)  # whether its progress is reported to the rescuer
    lost_at: int = field(init=False, default=-1)  # its number of generated tokens when its last engine died
    num_losses: int = field(init=False, default=0)  # engines in a row that died while it was at that position
    num_kills: int = field(init=False, default=0)  # those of them that were killed from outside
    was_tried: bool = field(init=False, default=False)  # it survived a trial; reset when it makes progress
    _on_engine: dict[int, Choice] = field(init=False, default_factory=dict)  # by the ids of their sequences
    _progress: dict[int, Prefill] = field(init=False, default_factory=dict)  # of the prompts, by choice
    _reported_s: float = field(init=False, default=0.0)  # when the log last got it

    def __post_init__(self) -> None:
        self.log = self.lease.log
        self.record = self.log.record

    @abstractmethod
    def fail(self, error: TailraceError) -> None:
        """End the stream with an error."""

    @abstractmethod
    def lease_lost(self) -> None:
        """Another server writes the stream now."""

    @abstractmethod
    def _on_settled(self) -> None:
        """The stream has `_SETTLED_TOKENS`, so the next slowed request may start."""

    @abstractmethod
    def _end_if_complete(self) -> None:
        """End the stream if all choices are complete."""

    @abstractmethod
    def _release(self) -> None:
        """The engine has no sequence of this stream any more: free its slot."""

    @property
    def num_generated(self) -> int:
        """Tokens that the engine has generated in all its sequences."""
        return sum(choice.num_generated for choice in self.choices)

    @property
    def was_alone(self) -> bool:
        """Whether an engine has computed some of its tokens alone: it runs again before the others."""
        return any(delta.is_alone for deltas in self._appended() for delta in deltas)

    @property
    def culprit(self) -> Culprit:
        """The request and the caller to blame if this stream kills engines."""
        return Culprit.of_record(self.record)

    # Calls from the engine (engines.Receiver)

    def push(self, delta: Delta) -> None:
        outcome: tuple[TextDelta, ...] | Problem
        try:
            choice = self._on_engine[delta.sequence_id]
        except KeyError:
            return  # the sequence was dropped
        try:
            outcome = choice.take(delta)
        except Exception:  # a defect in tailrace must end only this stream
            logger.exception("a delta could not be read")
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
            if choice.is_spent and not is_complete:
                outcome = (*outcome, self._end_reasoning(choice, outcome))
            if not self.is_handed_over:
                try:
                    self.store.append(self.lease, outcome)
                except LeaseLost:
                    self.lease_lost()
            if is_complete:
                if choice.is_on_engine:
                    self.engine.abort(choice.sequence.sequence_id)
                self._end_if_complete()
        if is_last and not self.is_suspended and not self._on_engine:
            self._release()

    def report(self, progress: Prefill) -> None:
        """Tell the log how much of all prompts is read, at most every `_PROGRESS_S`, and when all of it is. A stream
        that has events says nothing: its prompt is read again for a replay."""
        choice = self._on_engine.get(progress.sequence_id)
        if choice is None or self.log.events:
            return
        self._progress[choice.index] = progress
        prompts = enumerate(self.record.prompts)  # the first choice of each counts
        found = [(prompt, self._progress.get(place * self.record.sampling.n)) for place, prompt in prompts]
        read = [one for _, one in found if one is not None]
        num_tokens = sum(one.num_tokens if one and one.num_tokens else len(prompt.ids) for prompt, one in found)
        num_read_tokens = sum(one.num_read_tokens for one in read)
        now_s = time.monotonic()
        if num_read_tokens == num_tokens or now_s >= self._reported_s + _PROGRESS_S:
            self._reported_s = now_s
            num_cached_tokens = sum(one.num_cached_tokens for one in read)
            spent_s = now_s - (self.times.admitted_s or now_s)
            self.log.report(PromptProgress(num_tokens, num_read_tokens, num_cached_tokens, spent_s))

    def lost(self, error: EngineError) -> None:
        """The engine is gone. Called for each sequence; the first call handles all of them."""
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
        has_caught_up = self.rescuer.on_progress(self)
        is_settled = self.num_generated >= _SETTLED_TOKENS
        if is_settled:
            self._on_settled()
        self.is_watched = not (has_caught_up and is_settled)

    def _end_reasoning(self, choice: Choice, events: Iterable[TextDelta]) -> TextDelta:
        """The budget for reasoning is spent: end it, and run another sequence that continues with the answer. Returns
        the event that follows these events. All of them are kept together, so a replay finds all or none."""
        if choice.is_on_engine:
            self.engine.abort(choice.sequence.sequence_id)
            self._leave_engine(choice)
        ids = self._appended_ids()[choice.index]
        ended = choice.end_reasoning(
            self.new_sequence_id(), [*ids, *(one for event in events for one in event.token_ids)]
        )
        self._submit([choice])
        return ended

    def _on_problem(self, choice: Choice, problem: Problem) -> None:
        if problem.kind == "lost":
            self._retry(choice, problem)
        elif problem.kind == "diverged":
            self._continue_from_log(choice)
        else:
            self.fail(problem.error)

    # Running, and running again

    def resume(self, *, is_watched: bool = False) -> None:
        """Run the incomplete choices again, from the last event. With `is_watched`, report progress to the rescuer."""
        self.is_suspended = False
        self.is_watched = self.is_watched or is_watched
        appended = self._appended()
        if self.continuity is None and any(delta.token_ids for deltas in appended for delta in deltas):
            self.continuity = "replayed"
        for choice, deltas in zip(self.choices, appended, strict=True):
            if any(delta.finish_reason for delta in deltas):
                choice.on_complete()
            else:
                choice.reopen()
        running = [choice for choice in self.choices if not choice.is_complete]
        for choice in running:
            if not choice.start_replay(appended[choice.index]):
                self.fail(JournalDamaged("The stored tokens and the stored text of this stream do not match."))
                return
        self._submit(sorted(running, key=lambda choice: not choice.sequence.schedule.alone_end))

    def restore(self) -> None:
        """Take over the events of an earlier process. End the stream if they are complete."""
        for choice, token_ids in zip(self.choices, self._appended_ids(), strict=True):
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
            self._progress.clear()
            self.is_suspended = self.was_suspended = True
            self.times.num_losses += 1
            self.rescuer.on_suspended(self)

    def _leave_engine(self, choice: Choice) -> None:
        del self._on_engine[choice.sequence.sequence_id]
        choice.on_engine_done()

    def _retry(self, choice: Choice, problem: Problem) -> None:
        """Run a sequence again that a running engine lost."""
        deltas = self._appended()[choice.index]
        if not choice.may_retry() or sum(len(delta.token_ids) for delta in deltas) != choice.num_tokens:
            self.fail(problem.error)
            return
        if self.continuity is None:
            self.continuity = "replayed"
        choice.rename(self.new_sequence_id())
        choice.start_replay(deltas)
        self._submit([choice])

    def _continue_from_log(self, choice: Choice) -> None:
        """A replay differs from the log: continue after the log with another sequence."""
        record = self.record
        if record.exact:
            self.fail(Diverged("A replay gave a different answer, and this request needs the exact one."))
        elif record.sampling.grammar is not None and not record.sampling.grammar.is_free:
            # A grammar starts again with each sequence, so the result would not match it.
            self.fail(Diverged("A replay gave a different answer, and one with a grammar cannot be continued."))
        else:
            self.continuity = "continued"
            if choice.is_on_engine:
                self.engine.abort(choice.sequence.sequence_id)
                self._leave_engine(choice)
            choice.continue_from(self.new_sequence_id(), self._appended_ids()[choice.index])
            self._submit([choice])

    def _complete_all(self) -> None:
        """Complete all choices, and abort their sequences."""
        for choice in self.choices:
            if not choice.is_complete:
                choice.on_complete()
                if choice.is_on_engine:
                    self.engine.abort(choice.sequence.sequence_id)

    def _appended(self) -> list[list[TextDelta]]:
        """Return the deltas that were appended, by choice: those that readers can see, and those that wait to be
        committed."""
        deltas: list[list[TextDelta]] = [[] for _ in range(self.record.num_choices)]
        for event in (*self.log.events, *self.store.queued(self.lease)):
            if isinstance(event, TextDelta):
                deltas[event.choice].append(event)
        return deltas

    def _appended_ids(self) -> list[list[int]]:
        """Return the ids of the appended deltas, by choice."""
        return [[token_id for delta in deltas for token_id in delta.token_ids] for deltas in self._appended()]
