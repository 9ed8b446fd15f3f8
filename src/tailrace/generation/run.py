"""One request: its wait in the queue, its sequences on the engine, its readers, its end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tailrace.admission import Gate, QueueEntry
from tailrace.engines.interface import Delta, Prefill, Sequence
from tailrace.engines.worker_process import Receiver
from tailrace.errors import (
    Diverged,
    EngineError,
    EngineLost,
    Interrupted,
    JournalDamaged,
    LeaseLost,
    QueueTimeout,
    TailraceError,
)
from tailrace.generation.choice import Choice, Problem
from tailrace.generation.observers import Observers, Times
from tailrace.generation.prompt_progress import PromptReading
from tailrace.generation.whole_answers import Pair, to_check
from tailrace.schemas.answer_check import AnswerCheck
from tailrace.streams import Lease, LogStore, Producer, StreamLog
from tailrace.types import Continuity, End, Failure, Record, Status, TextDelta, Usage

__all__ = ["Run", "SequenceRunner"]

logger = logging.getLogger("tailrace.generation")

_FIRST_READER_S = 60.0  # how long a stream without linger time may wait for its first reader
_SETTLED_TOKENS = 4  # when a slowed request has as many tokens, the next one may start


class SequenceRunner(Protocol):
    """The part of the engine's supervisor that a stream needs."""

    failures: int  # failed starts in a row, including engines that died early

    @property
    def is_exact(self) -> bool:
        """Whether a sequence that runs again gives the same ids."""

    def submit(self, sequence: Sequence, receiver: Receiver) -> None: ...
    def abort(self, sequence_id: int) -> None: ...


class Rescuer(Protocol):
    """Resumes streams after their engine was lost."""

    def on_lost(self, run: Run, choices: Collection[Choice]) -> None:
        """The engine died while it had the sequences of these choices; of none if it was gone before they were
        submitted. Unless the stream is complete, it waits to be resumed on another engine."""

    def on_progress(self, run: Run) -> bool:
        """A watched stream has a new token. Returns whether it no longer needs to be watched."""

    def on_released(self, run: Run) -> None:
        """No engine has a sequence of the stream: it has ended, or waits in the queue again. Called only for streams
        that waited to be resumed at some time; for them it may be called more than once."""


@dataclass(slots=True, eq=False, repr=False, kw_only=True, weakref_slot=True)
class Run(Producer):
    """The producer of one stream: queued, admitted, running, ended. Ends its log exactly once.

    It receives the deltas of all its sequences (`engines.Receiver`), and appends their events to the log. When the
    engine dies, the stream is suspended: it keeps its slot until it is resumed on another engine, or ended.

    `on_end` is called when its terminal event is kept, or when another server has taken over its stream.
    """

    lease: Lease
    choices: list[Choice]
    times: Times
    store: LogStore
    gate: Gate
    answer_check: AnswerCheck
    engine: SequenceRunner
    new_sequence_id: Callable[[], int]
    rescuer: Rescuer
    observers: Observers
    on_end: Callable[[Run], None]
    log: StreamLog = field(init=False)
    record: Record = field(init=False)  # keeps prompts and caller, which the log drops at its end
    end: End | None = field(init=False, default=None)  # set when it is decided; `log.end` when it can be read
    continuity: Continuity | None = field(init=False, default=None)
    is_handed_over: bool = field(init=False, default=False)  # another server writes the stream, or will
    is_suspended: bool = field(init=False, default=False)
    is_watched: bool = field(init=False, default=False)  # whether its progress is reported to the rescuer
    _awaits_token: bool = field(init=False, default=True)  # its first one, or a new one after a loss
    _has_begun: bool = field(init=False, default=False)  # the engine had its sequences before
    _left_s: float | None = field(init=False, default=None)  # when it left the engine to others; None if it has it
    _entry: QueueEntry | None = field(init=False, default=None)  # in the queue, then with its slot
    _on_engine: dict[int, Choice] = field(init=False, default_factory=dict)  # by the ids of their sequences
    _reading: PromptReading = field(init=False)
    _check: asyncio.Task[None] | None = field(init=False, default=None)  # of the whole answers

    def __post_init__(self) -> None:
        self.log = self.lease.log
        self.record = self.log.record
        self._reading = PromptReading(self.record)

    @property
    def status(self) -> str:
        """queued, running, or the status of the terminal event when it can be read."""
        if self.log.end is not None:
            return self.log.end.status
        return "running" if self._entry is not None and self._entry.admitted_s is not None else "queued"

    @property
    def num_ahead(self) -> int:
        """How many requests have their turn before it; 0 when it is admitted."""
        return self.gate.num_ahead(self._entry) if self._entry is not None else 0

    @property
    def usage(self) -> Usage:
        if self.end is not None:
            return self.end.usage
        record = self.record
        num_prompt_tokens = record.num_prompt_tokens
        for choice in self.choices[:: record.sampling.n]:  # the first choice of each prompt
            if choice.usage is not None:
                num_prompt_tokens += choice.usage[0] - record.prompts[choice.index // record.sampling.n].num_tokens
        return Usage(num_prompt_tokens, sum(choice.num_answer_tokens for choice in self.choices))

    def _num_cached_tokens(self) -> int | None:
        """Return how many tokens of the prompts were found in a prefix cache; None if the engine does not say."""
        counts = [choice.num_cached_tokens for choice in self.choices[:: self.record.sampling.n]]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    @property
    def is_complete(self) -> bool:
        """Whether the log has all events of its choices, or will have them when they are committed."""
        return all(choice.is_complete for choice in self.choices)

    @property
    def num_generated(self) -> int:
        """Tokens that the engine has generated in all its sequences."""
        return sum(choice.num_generated for choice in self.choices)

    @property
    def was_alone(self) -> bool:
        """Whether an engine has computed some of its tokens alone: it runs again before the others."""
        return any(delta.is_alone for deltas in self._appended() for delta in deltas)

    def _appended(self) -> list[list[TextDelta]]:
        """Return the deltas that were appended, by choice: those that readers can see, and those that wait to be
        committed."""
        deltas: list[list[TextDelta]] = [[] for _ in range(self.record.num_choices)]
        for event in (*self.log.events, *self.log.queued):
            if isinstance(event, TextDelta):
                deltas[event.choice].append(event)
        return deltas

    def _appended_ids(self) -> list[list[int]]:
        """Return the ids of the appended deltas, by choice."""
        return [[token_id for delta in deltas for token_id in delta.token_ids] for deltas in self._appended()]

    # The queue

    def enter(self, num_tokens: int, *, queue_s: float, is_slowed: bool = False) -> None:
        """Queue this run for at most `queue_s`, counted as in `QueueEntry`."""
        self.times.entered_s = time.monotonic()
        is_background = self.record.is_background
        self._entry = QueueEntry(
            num_tokens,
            len(self.choices),
            self._start,
            owner=self.record.owner,
            is_slowed=is_slowed,
            is_background=is_background,
            preempt=self._preempt if is_background else None,
            queue_s=queue_s,
            expire=self._expire if not is_background else None,
        )
        self.is_watched = is_slowed
        self.gate.enter(self._entry)
        # Its client does not read yet. If no reader ever comes, `unread` is never called.
        self.log.linger(_FIRST_READER_S)

    def _start(self) -> None:
        if not self._has_begun:
            self.times.admitted_s = time.monotonic()
            self.observers.on_admitted(self.record, self.times)
        if self._left_s is not None:
            waited_s, self._left_s = time.monotonic() - self._left_s, None
            self.observers.on_readmitted(self.record, waited_s)
            self.resume(is_replay=False)
        elif self._has_begun or self.log.events:  # from an earlier process
            self.resume()
        else:
            self._has_begun = True
            self._submit(self.choices)

    def _preempt(self) -> None:
        """Leave the engine to another request, and wait in the queue again. Does nothing if this cannot be interrupted,
        or ends anyway."""
        entry = self._entry
        if entry is None or not self._on_engine or self.is_suspended or self.is_complete or self.end is not None:
            return
        if self._needs_exact_replay and (self.log.events or self.log.queued) and not self.engine.is_exact:
            return
        self._has_begun = True
        self._left_s = time.monotonic()
        self.times.num_preemptions += 1
        self._reading.begin_again()
        for choice in list(self._on_engine.values()):
            self._take_off(choice)
            choice.rename(self.new_sequence_id())
        self._release()
        self._entry = dataclasses.replace(entry)
        self.gate.enter(self._entry)

    def _expire(self) -> None:
        self.fail(QueueTimeout("The model was too busy to begin this request in time."))

    def _release(self) -> None:
        """Free the slot, if the end has not freed it already."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self.gate.leave(entry)
        if self.times.num_losses:
            self.rescuer.on_released(self)

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
            if self._awaits_token:
                self._on_awaited_token()
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

    def _on_awaited_token(self) -> None:
        self._awaits_token = False
        times = self.times
        if times.first_s is None and self.continuity is None:  # else an earlier process had the first token
            times.first_s = self.log.first_s = time.monotonic()
            self.observers.on_first_token(self.record, times)
        if times.lost_s is not None:
            self.observers.on_caught_up(self.record, time.monotonic() - times.lost_s)
            times.lost_s = None

    def report(self, progress: Prefill) -> None:
        """Tell the log how much of all prompts is read. A stream that has events says nothing: its prompt is read again
        for a replay."""
        choice = self._on_engine.get(progress.sequence_id)
        if choice is None or self.log.events:
            return
        reported = self._reading.take(choice.index, progress, self.times.admitted_s)
        if reported is not None:
            self.log.report(reported)

    def lost(self, error: EngineError) -> None:
        """The engine is gone. Called for each sequence; the first call handles all of them."""
        if not self._on_engine:
            return
        choices = list(self._on_engine.values())
        self.rescuer.on_lost(self, choices)
        for choice in choices:
            self._leave_engine(choice)
        if self.is_complete:
            self._release()
        else:
            self._suspend()

    def _leave_engine(self, choice: Choice) -> None:
        del self._on_engine[choice.sequence.sequence_id]
        choice.on_engine_done()

    def _on_watched_progress(self) -> None:
        has_caught_up = self.rescuer.on_progress(self)
        is_settled = self.num_generated >= _SETTLED_TOKENS
        if is_settled and self._entry is not None:
            self.gate.settle(self._entry)
        self.is_watched = not (has_caught_up and is_settled)

    def _end_reasoning(self, choice: Choice, events: Iterable[TextDelta]) -> TextDelta:
        """The budget for reasoning is spent: end it, and run another sequence that continues with the answer. Returns
        the event that follows these events. All of them are kept together, so a replay finds all or none."""
        self._take_off(choice)
        ids = self._appended_ids()[choice.index]
        ended = choice.end_reasoning(
            self.new_sequence_id(), [*ids, *(one for event in events for one in event.token_ids)]
        )
        self._submit([choice])
        return ended

    # Running, and running again

    def _submit(self, choices: Iterable[Choice]) -> None:
        try:
            for choice in choices:
                self.engine.submit(choice.sequence, self)
                self._on_engine[choice.sequence.sequence_id] = choice
                choice.on_submit()
        except EngineLost:
            self._suspend()
            self.rescuer.on_lost(self, ())

    def _take_off(self, choice: Choice) -> None:
        """Abort the sequence of a choice that continues with another one."""
        if choice.is_on_engine:
            self.engine.abort(choice.sequence.sequence_id)
            self._leave_engine(choice)

    def _suspend(self) -> None:
        if not self.is_suspended:
            self._reading.begin_again()
            self.is_suspended = True
            self.times.num_losses += 1
            self._lose()

    def _lose(self) -> None:
        """The stream has no new token from now on, until it has caught up with its log."""
        self._awaits_token = True
        if self.times.lost_s is None:
            self.times.lost_s = time.monotonic()

    def resume(self, *, is_watched: bool = False, is_replay: bool = True) -> None:
        """Run the incomplete choices again, from the last event. With `is_watched`, report progress to the rescuer.
        `is_replay`: observers count it as one."""
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
        if is_replay:
            self._report_replay(appended[choice.index] for choice in running)
        for choice in running:
            if not choice.start_replay(appended[choice.index]):
                self.fail(JournalDamaged("The stored tokens and the stored text of this stream do not match."))
                return
        self._submit(sorted(running, key=lambda choice: not choice.sequence.schedule.alone_end))

    def _report_replay(self, answers: Iterable[list[TextDelta]]) -> None:
        num_tokens = sum(len(delta.token_ids) for deltas in answers for delta in deltas)
        self.observers.on_replay(self.record, num_tokens)

    def restore(self) -> None:
        """Take over the events of an earlier process. End the stream if they are complete."""
        self._lose()
        appended = self._appended_ids()
        self.observers.on_taken_over(self.record, sum(map(len, appended)))
        for choice, token_ids in zip(self.choices, appended, strict=True):
            choice.restore(token_ids)
        for event in self.log.events:
            if isinstance(event, TextDelta) and event.finish_reason is not None:
                self.choices[event.choice].on_complete()
        self._end_if_complete()

    @property
    def _needs_exact_replay(self) -> bool:
        """Whether no other sequence may continue after the log: the client wants the exact answer, or a grammar, which
        starts again with each sequence, so that the result would not match it."""
        grammar = self.record.sampling.grammar
        return self.record.exact or (grammar is not None and not grammar.is_free)

    def _on_problem(self, choice: Choice, problem: Problem) -> None:
        if problem.kind == "lost":
            self._retry(choice, problem)
        elif problem.kind == "diverged":
            self._continue_from_log(choice)
        else:
            self.fail(problem.error)

    def _retry(self, choice: Choice, problem: Problem) -> None:
        """Run a sequence again that a running engine lost."""
        deltas = self._appended()[choice.index]
        if not choice.may_retry() or sum(len(delta.token_ids) for delta in deltas) != choice.num_tokens:
            self.fail(problem.error)
            return
        if self.continuity is None:
            self.continuity = "replayed"
        self._lose()
        self._report_replay([deltas])
        choice.rename(self.new_sequence_id())
        choice.start_replay(deltas)
        self._submit([choice])

    def _continue_from_log(self, choice: Choice) -> None:
        """A replay differs from the log: continue after the log with another sequence."""
        if self.record.exact:
            self.fail(Diverged("A replay gave a different answer, and this request needs the exact one."))
        elif self._needs_exact_replay:
            self.fail(Diverged("A replay gave a different answer, and one with a grammar cannot be continued."))
        else:
            self.continuity = "continued"
            self._take_off(choice)
            choice.continue_from(self.new_sequence_id(), self._appended_ids()[choice.index])
            self._submit([choice])

    # Calls from the log (streams.Producer)

    def unread(self) -> None:
        self.log.linger()

    def cancel(self) -> None:
        """End the stream as cancelled, and free its slot. Does nothing if it has ended."""
        self._end("cancelled")

    def ended(self) -> None:
        """The terminal event can be read."""
        assert self.log.end is not None
        self.log.producer = None  # later readers need only the log
        self.observers.on_end(self.record, self.log, self.times)
        self.on_end(self)

    def lease_lost(self) -> None:
        """Another server writes the stream: stop generating it here."""
        if self.is_handed_over:
            return
        self.hand_over(LeaseLost("Another server continues this stream."))
        self._complete_all()
        if not self._on_engine:
            self._release()
        self.on_end(self)

    # Ends

    def hand_over(self, reason: TailraceError) -> None:
        """Leave the stream in the store, for another process to continue. Its readers are told the reason."""
        self.is_handed_over = True
        self.log.release(reason)

    def interrupt(self, why: str = "The server was shut down before the answer was complete.") -> None:
        """End the stream because the server stops, or cannot run it."""
        self._end("interrupted", Interrupted(why))

    def fail(self, error: TailraceError) -> None:
        """End the stream with an error."""
        self._end("error", error)

    def fail_unpersisted(self, error: TailraceError) -> None:
        """End the stream with an error, even if another end was decided: events not yet kept are lost."""
        if not self.is_handed_over:
            self.end = None
            num_tokens = sum(map(len, self._appended_ids()))
            self._end("error", error, Usage(self.record.num_prompt_tokens, num_tokens))

    def _end_if_complete(self) -> None:
        if not self.is_complete:
            return
        pairs = to_check(self.record, self._appended()) if self.record.sampling.grammar is not None else []
        if not pairs:
            self._end("done")
        elif self._check is None:
            self._check = asyncio.create_task(self._check_answers(pairs))

    async def _check_answers(self, pairs: list[Pair]) -> None:
        """Check the answers against the schemas of the request, and end the stream."""
        found = await self.answer_check([(schema, text) for _, schema, text in pairs])
        named = (name + one for (name, *_), each in zip(pairs, found, strict=True) for one in each)
        self._end("done", schema_mismatches=tuple(named))

    def _end(
        self,
        status: Status,
        error: TailraceError | None = None,
        usage: Usage | None = None,
        *,
        schema_mismatches: tuple[str, ...] | None = None,
    ) -> None:
        if self.end is not None or self.is_handed_over:
            return
        self.times.ended_s = time.monotonic()
        failure = Failure(error.code, error.message) if error is not None else None
        spent = self.times.spent() if status == "done" else None
        num_reasoning_tokens = sum(choice.num_reasoning_tokens for choice in self.choices if choice.usage is None)
        self.end = End(
            status,
            usage or self.usage,
            failure,
            spent,
            self.continuity,
            num_reasoning_tokens,
            self._num_cached_tokens() if status == "done" else None,
            schema_mismatches,
        )
        self._complete_all()
        try:
            self.store.append(self.lease, (self.end,))
        except LeaseLost:
            self.lease_lost()
        self.is_suspended = False
        if not self._on_engine:
            self._release()

    def _complete_all(self) -> None:
        """Complete all choices, and abort their sequences."""
        for choice in self.choices:
            if not choice.is_complete:
                choice.on_complete()
                if choice.is_on_engine:
                    self.engine.abort(choice.sequence.sequence_id)
