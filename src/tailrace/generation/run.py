"""One request on its way through the queue and the engine."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tailrace.admission import Gate, Ticket
from tailrace.engines import Receiver
from tailrace.engines.promise import Sequence
from tailrace.errors import EngineLost
from tailrace.generation.blame import Culprit
from tailrace.generation.choice import Choice
from tailrace.streams import StreamLog, StreamStore
from tailrace.types import Continuity, End, Event, Failure, Spent, Status, TextDelta, Usage

if TYPE_CHECKING:
    from tailrace.generation.generator import Generator

__all__ = ["Run", "SequenceRunner", "Times"]


_FIRST_READER_S = 60.0  # how long a stream that ends with its last reader may wait for its first
_SETTLED_TOKENS = 4  # from a slowed request, after which the next one may begin
_MAX_SHUT_S = 300.0  # of the time in the queue, for which the gate was shut and which does not count
_MIN_WAIT_S = 0.25  # between two looks at the time that is left in the queue while the gate is shut
_ages = itertools.count()


@dataclass(slots=True)
class Times:
    """When a request came to each of its stations, on the monotonic clock; None for what it has not come to."""

    asked_s: float
    entered_s: float | None = None  # the queue
    admitted_s: float | None = None
    first_s: float | None = None  # the first token
    ended_s: float | None = None

    def spent(self) -> Spent | None:
        """Where the time went, once there was a token and an end."""
        if self.admitted_s is None or self.first_s is None or self.ended_s is None:
            return None
        return Spent(self.ended_s - self.asked_s, self.first_s - self.admitted_s, self.ended_s - self.first_s)


class SequenceRunner(Protocol):
    """The part of the engine's supervisor that a run needs."""

    failures: int  # engines in a row that did not start, or did not last

    def submit(self, sequence: Sequence, receiver: Receiver) -> None: ...
    def abort(self, sequence_id: int) -> None: ...


class Run:
    """The producer of one stream: queued, admitted, running, finished. Ends its log exactly once.

    When its engine dies it is stranded: it keeps its place until it is resumed on another one, or ended.
    """

    __slots__ = (
        "__weakref__",
        "_caller",
        "_engine",
        "_gate",
        "_generator",
        "_is_parked",
        "_linger_timer",
        "_queue_timer",
        "_store",
        "_ticket",
        "age",
        "choices",
        "continuity",
        "end",
        "fell_at",
        "is_stranded",
        "is_watched",
        "log",
        "num_falls",
        "num_kills",
        "times",
        "was_tried",
    )

    def __init__(
        self,
        log: StreamLog,
        *,
        asked_s: float,
        store: StreamStore,
        gate: Gate,
        engine: SequenceRunner,
        generator: Generator,
    ) -> None:
        self.log = log
        log.producer = self
        self.age = next(_ages)
        self.times = Times(asked_s)
        self.choices: list[Choice] = []
        self.end: End | None = None  # as soon as it is decided; `log.end` is there when it can be read
        self.continuity: Continuity | None = None
        self.is_stranded = False
        self.is_watched = False  # whether somebody wants to know when it moves
        self.fell_at = -1  # tokens that the last engine that died under it had given
        self.num_falls = 0  # engines in a row that died under it at that place
        self.num_kills = 0  # of those, engines that were killed from outside
        self.was_tried = False  # alone on an engine, and the engine lived; until it has come on
        self._caller = log.record.caller
        self._is_parked = False
        self._store = store
        self._gate = gate
        self._engine = engine
        self._generator = generator
        self._ticket: Ticket | None = None
        self._queue_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    @property
    def usage(self) -> Usage:
        if self.end is not None:
            return self.end.usage
        record = self.log.record
        num_prompt_tokens = record.num_prompt_tokens
        for choice in self.choices[:: record.sampling.n]:  # the first of each prompt's
            if choice.usage is not None:
                num_prompt_tokens += choice.usage[0] - len(record.prompts[choice.index // record.sampling.n].ids)
        return Usage(num_prompt_tokens, sum(choice.num_answer_tokens for choice in self.choices))

    @property
    def status(self) -> str:
        """queued, running, or the status of the terminal event, once that can be read."""
        if self.log.end is not None:
            return self.log.end.status
        return "running" if self._ticket is not None and self._ticket.admitted_s is not None else "queued"

    def enter(self, num_tokens: int, *, queue_s: float, is_slowed: bool = False) -> None:
        """Take a place in the queue, for at most `queue_s`. The time in which the gate is shut does not count, but for
        what exceeds five minutes."""
        self.times.entered_s = time.monotonic()
        self._ticket = Ticket(num_tokens, len(self.choices), self._start, is_slowed=is_slowed)
        self.is_watched = is_slowed
        self._gate.enter(self._ticket)
        # Whoever asked has not begun to read; if nobody ever does, nobody will leave either.
        loop = asyncio.get_running_loop()
        if self.end is None:
            self._linger_timer = loop.call_later(self.log.record.linger_s or _FIRST_READER_S, self.cancel)
        if self._ticket is not None and self._ticket.admitted_s is None:
            last_s = self.times.entered_s + queue_s + _MAX_SHUT_S
            self._queue_timer = loop.call_later(queue_s, self._expire, self._gate.total_shut_s, last_s)

    def unread(self) -> None:
        """Nobody reads any more: cancel, at once or when nobody has come back for the stream's linger time."""
        if self.end is not None or self._is_parked:
            return
        linger_s = self.log.record.linger_s
        if linger_s <= 0:
            self.cancel()
        else:
            self._linger_timer = asyncio.get_running_loop().call_later(linger_s, self.cancel)

    def read(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def cancel(self) -> None:
        """End the stream as cancelled, at once and everywhere. Does nothing when it has ended."""
        self._end("cancelled")

    def interrupt(self) -> None:
        """End the stream because the server goes away."""
        self._end("interrupted", Failure("interrupted", "The server was shut down before the answer was complete."))

    def fail(self, code: str, message: str) -> None:
        """End the stream with an error."""
        self._end("error", Failure(code, message))

    def lose(self, code: str, message: str) -> None:
        """End the stream with an error, whatever was decided: what waits to be kept never will be seen."""
        if not self._is_parked:
            self.end = None
            num_tokens = sum(map(len, self._delivered()))
            self._end("error", Failure(code, message), Usage(self.log.record.num_prompt_tokens, num_tokens))

    def park(self) -> None:
        """Leave the stream as it is in the journal, for another process to go on with."""
        self._is_parked = True
        self._cancel_timers()
        self.log.park()

    # What its choices say

    def write(self, event: Event) -> None:
        """Put an event into the log."""
        if not self._is_parked:
            self._store.append(self.log, event)

    def begun(self) -> None:
        """A choice has its first token."""
        if self.times.first_s is None:
            self.times.first_s = time.monotonic()

    def moved(self) -> None:
        """A choice has a token more, and that is watched."""
        is_proved = self._generator.recovery.moved(self)
        is_settled = self.num_heard >= _SETTLED_TOKENS
        if is_settled and self._ticket is not None:
            self._gate.settle(self._ticket)
        self.is_watched = not (is_proved and is_settled)

    def finished(self) -> None:
        """A choice is complete; so is the stream, if it was the last."""
        if all(choice.is_finished for choice in self.choices):
            self._end("done")

    def abort(self, choice: Choice) -> None:
        """Take a choice off the engine, which confirms it within a step."""
        self._engine.abort(choice.sequence.sequence_id)

    def left(self) -> None:
        """The engine is done with a choice; with the last one the place in the batch is free again."""
        if not self.is_stranded and not any(choice.in_engine for choice in self.choices):
            self._give_place_back()

    # When engines die

    @property
    def num_heard(self) -> int:
        """How many tokens the engine has given of its sequences."""
        return sum(choice.num_heard for choice in self.choices)

    def culprit(self) -> Culprit:
        """What is to be blamed if it kills engines."""
        record = self.log.record
        if record.prompts:
            prompt_ids = [prompt.ids for prompt in record.prompts]
        else:  # its stream was cancelled since, and has forgotten them
            prompt_ids = [choice.sequence.prompt_ids for choice in self.choices[:: record.sampling.n]]
        return Culprit.of(self._caller, prompt_ids, record.sampling)

    def fell(self) -> None:
        """The engine is gone, and had some of its sequences."""
        self._generator.recovery.fell(self)

    def strand(self) -> None:
        """The engine is gone, and something was still to come."""
        if not self.is_stranded:
            self.is_stranded = True
            self._generator.recovery.strand(self)

    def resume(self, *, is_watched: bool = False) -> None:
        """Run again what is not complete, behind what the log has."""
        self.is_stranded = False
        self.is_watched = self.is_watched or is_watched
        self._store.journal.retract(self.log)
        ids = self._delivered()
        if self.continuity is None and any(ids):
            self.continuity = "replayed"
        ended = {event.choice for event in self.log.events if isinstance(event, TextDelta) and event.finish_reason}
        for choice in self.choices:
            choice.is_finished = choice.index in ended  # what was retracted is not
        running = [choice for choice in self.choices if not choice.is_finished]
        for choice in running:
            if choice.again(ids[choice.index]) != self.log.text(choice.index):
                self.fail("journal_damaged", "What was kept of this stream does not fit together.")
                return
        self._submit(running)

    def restore(self) -> None:
        """Take over what the log has of an earlier process's work. If that was all, end it."""
        for event in self.log.events:
            if isinstance(event, TextDelta):
                choice = self.choices[event.choice]
                choice.num_tokens += len(event.token_ids)
                choice.is_finished = choice.is_finished or event.finish_reason is not None
        self.finished()

    def cut(self, choice: Choice, reason: str) -> None:
        """What the engine ran a choice on went away, and the engine is there: the choice runs again, by itself."""
        self._store.journal.flush()
        ids = self._delivered()[choice.index]
        # While the journal is in trouble, readers have less than was written.
        if not choice.may_try_again() or len(ids) != choice.num_tokens:
            self.fail("engine_unavailable", reason)
            return
        if self.continuity is None:
            self.continuity = "replayed"
        choice.renew(self._generator.new_sequence_id())
        choice.again(ids)
        self._submit([choice])

    def diverged(self, choice: Choice) -> None:
        """A choice that runs again says something else than it said before."""
        record = self.log.record
        if record.exact:
            self.fail("diverged", "The answer came out differently after the engine was lost, and exactness was asked.")
        elif record.sampling.grammar is not None:
            # A grammar begins anew with a sequence: what would come is no continuation.
            self.fail("diverged", "The answer came out differently after the engine was lost; a grammar cannot go on.")
        else:
            self.continuity = "continued"
            self._engine.abort(choice.sequence.sequence_id)
            choice.go_on(self._generator.new_sequence_id(), self._delivered()[choice.index])
            self._submit([choice])

    def ended(self) -> None:
        """The terminal event can be read."""
        self._store.finish(self.log)
        self._generator.ended(self)

    def _delivered(self) -> list[list[int]]:
        """The ids of each choice that are in the log, which is all that anybody may have seen."""
        ids: list[list[int]] = [[] for _ in range(self.log.record.num_choices)]
        for event in self.log.events:
            if isinstance(event, TextDelta):
                ids[event.choice] += event.token_ids
        return ids

    def _start(self) -> None:
        self.times.admitted_s = time.monotonic()
        if self._queue_timer is not None:
            self._queue_timer.cancel()
        if self.log.events:  # of an earlier process
            self.resume()
        else:
            self._submit(self.choices)

    def _submit(self, choices: list[Choice]) -> None:
        try:
            for choice in choices:
                self._engine.submit(choice.sequence, choice)
                choice.in_engine = True
        except EngineLost:
            self.strand()

    def _expire(self, shut_s: float, last_s: float) -> None:
        """The time in the queue is over, but for that in which the gate was shut: for `shut_s` when the time began. At
        `last_s` it is over in any case."""
        now_shut_s = self._gate.total_shut_s
        left_s = min(max(_MIN_WAIT_S, now_shut_s - shut_s), last_s - time.monotonic())
        if now_shut_s > shut_s and left_s > 0:
            self._queue_timer = asyncio.get_running_loop().call_later(left_s, self._expire, now_shut_s, last_s)
            return
        self.fail("queue_timeout", "The model was too busy to begin this request in time.")

    def _end(self, status: Status, failure: Failure | None = None, usage: Usage | None = None) -> None:
        if self.end is not None or self._is_parked:
            return
        self.times.ended_s = time.monotonic()
        waiting = self._ticket is not None and self._ticket.admitted_s is None
        spent = self.times.spent() if status == "done" else None
        self.end = End(status, usage or self.usage, failure, spent, self.continuity)
        for choice in self.choices:
            if not choice.is_finished:
                choice.is_finished = True
                if choice.in_engine:
                    self._engine.abort(choice.sequence.sequence_id)
        self._cancel_timers()
        self.write(self.end)
        self.is_stranded = False
        if waiting or not any(choice.in_engine for choice in self.choices):
            self._give_place_back()

    def _cancel_timers(self) -> None:
        for timer in (self._queue_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()

    def _give_place_back(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._gate.leave(ticket)
        self._generator.recovery.left(self)
        if self.end is not None:
            self.choices.clear()  # a run that has ended keeps for its readers' time only what they may ask for
