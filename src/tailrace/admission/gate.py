"""A first-come, first-served queue in front of a budget of tokens and sequences.

Requests of a caller who keeps killing engines are *slowed*. They begin one at a time: the next one is started when the
one before has given some tokens, or has ended. They also wait while the gate `rest`s, so that the streams which already
run get somewhere between two kills. Requests of other callers overtake them meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tailrace.errors import ContextLengthExceeded, Draining, EngineLost, QueueFull, RequestError

__all__ = ["Gate", "Ticket"]


class Ticket:
    """A request's place. `start` is called once, when it may run: at once, inside `Gate.enter`, or later."""

    __slots__ = ("admitted_s", "entered_s", "is_slowed", "num_sequences", "num_tokens", "start")

    def __init__(
        self, num_tokens: int, num_sequences: int, start: Callable[[], None], *, is_slowed: bool = False
    ) -> None:
        self.num_tokens = num_tokens
        self.num_sequences = num_sequences
        self.start = start
        self.is_slowed = is_slowed  # its caller keeps killing engines
        self.entered_s = time.monotonic()
        self.admitted_s: float | None = None  # None: still waiting


class Gate:
    """Admits tickets while they fit, in order of arrival.

    `max_requests` bounds those that run and those that wait, together. `open` and `shut` follow the engine: while it is
    shut nothing starts, and what comes waits its turn unless `reason` says that there is nothing to wait for.
    """

    def __init__(self, *, max_requests: int = 128) -> None:
        self._max_requests = max_requests
        self._capacity_tokens = 0
        self._capacity_sequences = 0
        self._block_tokens = 1
        self._used_tokens = 0
        self._used_sequences = 0
        self._is_open = False
        self._refusal: EngineLost | Draining | None = None
        self._waiting: deque[Ticket] = deque()
        self._num_running = 0
        self._num_coming = 0
        self._is_admitting = False
        self._mean_service_s = 1.0
        self._beginning: Ticket | None = None  # the slowed one that has not shown yet that it does no harm
        self._rest: asyncio.TimerHandle | None = None
        self._shut_s: float | None = time.monotonic()  # since when; None while it is open
        self._total_shut_s = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def total_shut_s(self) -> float:
        """How long the gate has been shut, all in all."""
        return self._total_shut_s + (time.monotonic() - self._shut_s if self._shut_s is not None else 0.0)

    @property
    def is_draining(self) -> bool:
        return isinstance(self._refusal, Draining)

    def open(self, *, capacity_tokens: int, capacity_sequences: int, block_tokens: int) -> None:
        """An engine is there, with room for so much."""
        self._capacity_tokens = capacity_tokens
        self._capacity_sequences = capacity_sequences
        self._block_tokens = block_tokens
        self._is_open = True
        self._total_shut_s, self._shut_s = self.total_shut_s, None
        if isinstance(self._refusal, EngineLost):
            self._refusal = None
        self._admit()

    def shut(self, reason: EngineLost | None = None) -> None:
        """No engine now. With a reason, nobody is let into the queue either."""
        if self._is_open:
            self._is_open = False
            self._shut_s = time.monotonic()
        if not isinstance(self._refusal, Draining):
            self._refusal = reason

    def drain(self, retry_after_s: float) -> None:
        """Let nobody in any more; who is in goes on."""
        self._refusal = Draining("The server is shutting down.", retry_after_s=retry_after_s)

    def rest(self, seconds: float) -> None:
        """Start no slowed request for so long. Needs a running event loop."""
        if self._rest is not None:
            self._rest.cancel()
        self._rest = asyncio.get_running_loop().call_later(seconds, self._rested)

    def settle(self, ticket: Ticket) -> None:
        """This one has shown that it does no harm, or has ended: the next slowed one may begin."""
        if self._beginning is ticket:
            self._beginning = None
            self._admit()

    def check(self, num_prompt_tokens: int, max_tokens: int, num_sequences: int, *, is_slowed: bool = False) -> int:
        """Whether such a request could ever run here; returns the tokens that it takes. Slowed ones may not take the
        last quarter of the places.

        Raises: ContextLengthExceeded and RequestError if never; QueueFull, Draining, EngineLost if not now.
        """
        self._check_refusal()
        num_tokens = self.demand(num_prompt_tokens, max_tokens, num_sequences)
        self._check_room(max(1, 3 * self._max_requests // 4) if is_slowed else self._max_requests)
        return num_tokens

    def demand(self, num_prompt_tokens: int, max_tokens: int, num_sequences: int) -> int:
        """The tokens that such a request takes. Raises: ContextLengthExceeded, RequestError if it can never run."""
        num_tokens = self._demand(num_prompt_tokens + max_tokens, num_sequences)
        if self._capacity_tokens:
            if num_tokens > self._capacity_tokens:
                limit = self._capacity_tokens // num_sequences
                raise ContextLengthExceeded(num_prompt_tokens, limit, max_tokens=max_tokens)
            if num_sequences > self._capacity_sequences:
                raise RequestError(f"n is at most {self._capacity_sequences} here.", param="n")
        return num_tokens

    def check_open(self) -> None:
        """Whether anybody is let in now, whatever they ask. Raises: QueueFull, Draining, EngineLost."""
        self._check_refusal()
        self._check_room(self._max_requests)

    def _check_refusal(self) -> None:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)  # else it would remember all that it was raised for

    def _check_room(self, num_places: int) -> None:
        if self._num_running + len(self._waiting) + self._num_coming >= num_places:
            raise QueueFull("The model is overloaded.", retry_after_s=self.retry_after_s)

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Count a request among those that wait while it is being looked at. Raises: as `check_open`."""
        self.check_open()
        self._num_coming += 1
        try:
            yield
        finally:
            self._num_coming -= 1

    def enter(self, ticket: Ticket) -> None:
        """Queue a ticket, and start it if its turn has come. Call `check` first, without waiting in between."""
        self._waiting.append(ticket)
        self._admit()

    def leave(self, ticket: Ticket) -> None:
        """Give a place back, waiting or running."""
        if ticket.admitted_s is None:
            self._waiting.remove(ticket)
        else:
            self._used_tokens -= ticket.num_tokens
            self._used_sequences -= ticket.num_sequences
            self._num_running -= 1
            self._mean_service_s += 0.1 * (time.monotonic() - ticket.admitted_s - self._mean_service_s)
        if self._beginning is ticket:
            self._beginning = None
        self._admit()

    @property
    def retry_after_s(self) -> float:
        """When a place should be free, going by how long requests have taken lately."""
        share = (len(self._waiting) + 1) / max(1, self._num_running)
        return min(30.0, max(1.0, self._mean_service_s * share))

    def _demand(self, num_tokens: int, num_sequences: int) -> int:
        """Memory is handed out in blocks, and a sequence's last one is partly empty."""
        block = self._block_tokens
        return num_sequences * (-(-num_tokens // block) * block + (block if block > 1 else 0))

    def _admit(self) -> None:
        if self._is_admitting:  # a ticket left as soon as it was started; the loop below goes on
            return
        self._is_admitting = True
        try:
            while self._is_open and (ticket := self._next()) is not None and self._fits(ticket):
                self._waiting.remove(ticket)
                self._used_tokens += ticket.num_tokens
                self._used_sequences += ticket.num_sequences
                self._num_running += 1
                ticket.admitted_s = time.monotonic()
                if ticket.is_slowed:
                    self._beginning = ticket
                ticket.start()
        finally:
            self._is_admitting = False

    def _next(self) -> Ticket | None:
        """Whose turn it is: the first that waits, of those that may begin now."""
        is_resting = self._rest is not None and self._num_running > 0  # else there is nobody to rest for
        may_slowed_begin = self._beginning is None and not is_resting
        return next((ticket for ticket in self._waiting if may_slowed_begin or not ticket.is_slowed), None)

    def _rested(self) -> None:
        self._rest = None
        self._admit()

    def _fits(self, ticket: Ticket) -> bool:
        return (
            self._used_tokens + ticket.num_tokens <= self._capacity_tokens
            and self._used_sequences + ticket.num_sequences <= self._capacity_sequences
        )
