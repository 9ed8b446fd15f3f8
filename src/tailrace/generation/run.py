"""One request: its wait in the queue, its readers, its end. `engine_side.py` has its time on the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tailrace.admission import Gate, QueueEntry
from tailrace.errors import Interrupted, LeaseLost, QueueTimeout, TailraceError
from tailrace.generation.engine_side import EngineSide
from tailrace.generation.whole_answers import Pair, to_check
from tailrace.schemas.answers import AnswerCheck
from tailrace.streams import Producer
from tailrace.types import End, Failure, Status, Usage

__all__ = ["Run"]

_FIRST_READER_S = 60.0  # how long a stream without linger time may wait for its first reader


@dataclass(slots=True, eq=False, repr=False, kw_only=True, weakref_slot=True)
class Run(EngineSide, Producer):
    """The producer of one stream: queued, admitted, running, ended. Ends its log exactly once.

    `on_end` is called when its terminal event is kept, or when another server has taken over its stream.
    """

    gate: Gate
    answer_check: AnswerCheck
    on_end: Callable[[Run], None]
    _entry: QueueEntry | None = field(init=False, default=None)
    _check: asyncio.Task[None] | None = field(init=False, default=None)  # of the whole answers

    @property
    def usage(self) -> Usage:
        if self.end is not None:
            return self.end.usage
        record = self.record
        num_prompt_tokens = record.num_prompt_tokens
        for choice in self.choices[:: record.sampling.n]:  # the first choice of each prompt
            if choice.usage is not None:
                num_prompt_tokens += choice.usage[0] - len(record.prompts[choice.index // record.sampling.n].ids)
        return Usage(num_prompt_tokens, sum(choice.num_answer_tokens for choice in self.choices))

    def _num_cached_tokens(self) -> int | None:
        """Return how many tokens of the prompts were found in a prefix cache; None if the engine does not say."""
        counts = [choice.num_cached_tokens for choice in self.choices[:: self.record.sampling.n]]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

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

    def enter(self, num_tokens: int, *, queue_s: float, is_slowed: bool = False) -> None:
        """Queue this run for at most `queue_s`, counted as in `QueueEntry`."""
        self.times.entered_s = time.monotonic()
        self._entry = QueueEntry(
            num_tokens,
            len(self.choices),
            self._start,
            owner=self.record.owner,
            is_slowed=is_slowed,
            queue_s=queue_s,
            expire=self._expire,
        )
        self.is_watched = is_slowed
        self.gate.enter(self._entry)
        # Its client does not read yet. If no reader ever comes, `unread` is never called.
        self.log.linger(_FIRST_READER_S)

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
        self.store.end(self.lease)
        self.on_end(self)

    # Other ends

    def interrupt(self) -> None:
        """End the stream because the server stops, or cannot run it."""
        self._end("interrupted", Interrupted("The server was shut down before the answer was complete."))

    def fail(self, error: TailraceError) -> None:
        self._end("error", error)

    def fail_unpersisted(self, error: TailraceError) -> None:
        """End the stream with an error, even if another end was decided: events not yet kept are lost."""
        if not self.is_handed_over:
            self.end = None
            num_tokens = sum(map(len, self._appended_ids()))
            self._end("error", error, Usage(self.record.num_prompt_tokens, num_tokens))

    def hand_over(self, reason: TailraceError) -> None:
        """Leave the stream in the store, for another process to continue. Its readers are told the reason."""
        self.is_handed_over = True
        self.log.release(reason)

    def _start(self) -> None:
        self.times.admitted_s = time.monotonic()
        self.observers.on_admitted(self.record, self.times)
        if self.log.events:  # from an earlier process
            self.resume()
        else:
            self._submit(self.choices)

    def _expire(self) -> None:
        self.fail(QueueTimeout("The model was too busy to begin this request in time."))

    def lease_lost(self) -> None:
        """Another server writes the stream: stop generating it here."""
        if self.is_handed_over:
            return
        self.hand_over(LeaseLost("Another server continues this stream."))
        self._complete_all()
        if not self._on_engine:
            self._release()
        self.on_end(self)

    def _on_settled(self) -> None:
        if self._entry is not None:
            self.gate.settle(self._entry)

    def _end_if_complete(self) -> None:
        if not all(choice.is_complete for choice in self.choices):
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

    def _release(self) -> None:
        """Free the slot, if the end has not freed it already."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self.gate.leave(entry)
        if self.was_suspended:
            self.rescuer.on_released(self)
