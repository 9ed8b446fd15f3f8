"""A first-come, first-served queue in front of a budget of tokens and sequences."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tailrace.errors import ContextLengthExceeded, Draining, EngineLost, QueueFull, RequestError

__all__ = ["Gate", "Ticket"]


class Ticket:
    """A request's place. `start` is called once, when it may run: at once, inside `Gate.enter`, or later."""

    __slots__ = ("admitted_s", "entered_s", "num_sequences", "num_tokens", "start")

    def __init__(self, num_tokens: int, num_sequences: int, start: Callable[[], None]) -> None:
        self.num_tokens = num_tokens
        self.num_sequences = num_sequences
        self.start = start
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

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def is_draining(self) -> bool:
        return isinstance(self._refusal, Draining)

    def open(self, *, capacity_tokens: int, capacity_sequences: int, block_tokens: int) -> None:
        """An engine is there, with room for so much."""
        self._capacity_tokens = capacity_tokens
        self._capacity_sequences = capacity_sequences
        self._block_tokens = block_tokens
        self._is_open = True
        if isinstance(self._refusal, EngineLost):
            self._refusal = None
        self._admit()

    def shut(self, reason: EngineLost | None = None) -> None:
        """No engine now. With a reason, nobody is let into the queue either."""
        self._is_open = False
        if not isinstance(self._refusal, Draining):
            self._refusal = reason

    def drain(self, retry_after_s: float) -> None:
        """Let nobody in any more; who is in goes on."""
        self._refusal = Draining("The server is shutting down.", retry_after_s=retry_after_s)

    def check(self, num_prompt_tokens: int, max_tokens: int, num_sequences: int) -> int:
        """Whether such a request could ever run here; returns the tokens that it takes.

        Raises: ContextLengthExceeded and RequestError if never; QueueFull, Draining, EngineLost if not now.
        """
        self._check_refusal()
        num_tokens = self.demand(num_prompt_tokens, max_tokens, num_sequences)
        self._check_room()
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
        self._check_room()

    def _check_refusal(self) -> None:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)  # else it would remember all that it was raised for

    def _check_room(self) -> None:
        if self._num_running + len(self._waiting) + self._num_coming >= self._max_requests:
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
            while self._is_open and self._waiting and self._fits(self._waiting[0]):
                ticket = self._waiting.popleft()
                self._used_tokens += ticket.num_tokens
                self._used_sequences += ticket.num_sequences
                self._num_running += 1
                ticket.admitted_s = time.monotonic()
                ticket.start()
        finally:
            self._is_admitting = False

    def _fits(self, ticket: Ticket) -> bool:
        return (
            self._used_tokens + ticket.num_tokens <= self._capacity_tokens
            and self._used_sequences + ticket.num_sequences <= self._capacity_sequences
        )
