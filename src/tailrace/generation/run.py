"""One request on its way through the queue and the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tailrace.admission import Gate, Ticket
from tailrace.engine import Sequence
from tailrace.errors import EngineLost
from tailrace.generation.choice import Choice
from tailrace.streams import StreamLog, StreamStore
from tailrace.types import End, Failure, Spent, Status, Usage

__all__ = ["Prompt", "Run", "SequenceRunner", "Times"]


_FIRST_READER_S = 60.0  # how long a stream that ends with its last reader may wait for its first


class Prompt(NamedTuple):
    """One prompt of a request: its text as the client knows it, "" where ids were given, and its ids."""

    text: str
    ids: tuple[int, ...]


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

    def submit(self, sequence: Sequence, receiver: Choice) -> None: ...
    def abort(self, sequence_id: int) -> None: ...


class Run:
    """The producer of one stream: queued, admitted, running, finished. Ends its log exactly once."""

    __slots__ = (
        "__weakref__",
        "_engine",
        "_gate",
        "_linger_s",
        "_linger_timer",
        "_on_end",
        "_queue_timer",
        "_store",
        "_ticket",
        "choices",
        "log",
        "model",
        "num_choices",
        "num_prompt_tokens",
        "prompts",
        "seed",
        "sequences",
        "times",
    )

    def __init__(
        self,
        log: StreamLog,
        *,
        model: str,
        prompts: tuple[Prompt, ...],
        seed: int,
        asked_s: float,
        linger_s: float,
        store: StreamStore,
        gate: Gate,
        engine: SequenceRunner,
        on_end: Callable[[Run], None],
    ) -> None:
        self.log = log
        log.producer = self
        self.model = model
        self.prompts = prompts
        self.num_prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self.num_choices = 0
        self.seed = seed
        self.times = Times(asked_s)
        self.choices: list[Choice] = []
        self.sequences: list[Sequence] = []
        self._store = store
        self._gate = gate
        self._engine = engine
        self._on_end = on_end
        self._linger_s = linger_s  # how long nobody may read before it is cancelled
        self._ticket: Ticket | None = None
        self._queue_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    @property
    def usage(self) -> Usage:
        if self.log.end is not None:
            return self.log.end.usage
        return Usage(self.num_prompt_tokens, sum(choice.num_tokens for choice in self.choices))

    @property
    def status(self) -> str:
        """queued, running, or the status of the terminal event."""
        if self.log.end is not None:
            return self.log.end.status
        return "running" if self._ticket is not None and self._ticket.admitted_s is not None else "queued"

    def enter(self, num_tokens: int, *, queue_s: float) -> None:
        """Take a place in the queue, for at most `queue_s`."""
        self.num_choices = len(self.choices)
        self.times.entered_s = time.monotonic()
        self._ticket = Ticket(num_tokens, self.num_choices, self._start)
        self._gate.enter(self._ticket)
        # Whoever asked has not begun to read; if nobody ever does, nobody will leave either.
        loop = asyncio.get_running_loop()
        if self.log.end is None:
            self._linger_timer = loop.call_later(self._linger_s or _FIRST_READER_S, self.cancel)
        if self._ticket is not None and self._ticket.admitted_s is None:
            self._queue_timer = loop.call_later(queue_s, self._expire)

    def unread(self) -> None:
        """Nobody reads any more: cancel, at once or when nobody has come back for `linger_s`."""
        if self.log.end is not None:
            return
        if self._linger_s <= 0:
            self.cancel()
        else:
            self._linger_timer = asyncio.get_running_loop().call_later(self._linger_s, self.cancel)

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

    def begun(self) -> None:
        """A choice has its first token."""
        if self.times.first_s is None:
            self.times.first_s = time.monotonic()

    def finished(self) -> None:
        """A choice is complete; so is the stream, if it was the last."""
        if all(choice.is_finished for choice in self.choices):
            self._end("done")

    def abort(self, choice: Choice) -> None:
        """Take a choice off the engine, which confirms it within a step."""
        self._engine.abort(choice.sequence_id)

    def left(self) -> None:
        """The engine is done with a choice; with the last one the place in the batch is free again."""
        if all(choice.is_gone for choice in self.choices):
            self._give_place_back()

    def _start(self) -> None:
        self.times.admitted_s = time.monotonic()
        if self._queue_timer is not None:
            self._queue_timer.cancel()
        try:
            for sequence, choice in zip(self.sequences, self.choices, strict=True):
                self._engine.submit(sequence, choice)
        except EngineLost as error:
            self.fail(error.code, error.message)
            self._give_place_back()

    def _expire(self) -> None:
        self.fail("queue_timeout", "The model was too busy to begin this request in time.")

    def _end(self, status: Status, failure: Failure | None = None) -> None:
        if self.log.end is not None:
            return
        self.times.ended_s = time.monotonic()
        waiting = self._ticket is not None and self._ticket.admitted_s is None
        for choice in self.choices:
            if not choice.is_finished:
                choice.is_finished = True
                if not waiting and not choice.is_gone:
                    self._engine.abort(choice.sequence_id)
        self.log.append(End(status, self.usage, failure, self.times.spent() if status == "done" else None))
        for timer in (self._queue_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        if waiting:
            self._give_place_back()
        self._store.finish(self.log)
        self._on_end(self)

    def _give_place_back(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._gate.leave(ticket)
        self._release()

    def _release(self) -> None:
        """Once it has ended and left the engine, a run keeps for its readers' time only what they may ask for."""
        if self.log.end is not None and self._ticket is None:
            self.choices.clear()
            self.sequences.clear()
            self.prompts = ()
