"""A queue in front of a budget of tokens and sequences: owners in turns, and each owner's requests as they came.

Places are shared, too. Once all are taken, an owner who has fewer than an equal share of them is still let in, so that
one who asks for everything does not shut the others out.

Requests of a caller who keeps killing engines are *slowed*. They begin one at a time: the next one is started when the
one before has given some tokens, or has ended. They also wait while the gate `rest`s, so that the streams which already
run get somewhere between two kills. Requests of other callers overtake them meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tailrace.admission.queue import FairQueue
from tailrace.errors import ContextLengthExceeded, Draining, EngineLost, QueueFull, RequestError
from tailrace.types import ANONYMOUS

__all__ = ["Gate", "Ticket"]

_MAX_LOST_S = 300.0  # of the time in the queue, which the engine lost and which does not count
_MIN_WAIT_S = 0.25  # between two looks at the time that is left in the queue while that grows


@dataclass(slots=True, eq=False, repr=False)
class Ticket:
    """A request's place. `start` is called once, when it may run: at once, inside `Gate.enter`, or later.

    `expire` is called when it has waited for `queue_s`. The time in which the engine is away, or repeats what it had
    done, does not count, but for what exceeds five minutes.
    """

    num_tokens: int
    num_sequences: int
    start: Callable[[], None]
    owner: str = ANONYMOUS
    is_slowed: bool = False  # its caller keeps killing engines
    queue_s: float = 0.0
    expire: Callable[[], None] | None = None
    admitted_s: float | None = field(init=False, default=None)  # None: still waiting
    timer: asyncio.TimerHandle | None = field(init=False, default=None)  # while it waits


class Gate:
    """Admits tickets while they fit.

    `max_requests` bounds those that run and those that wait, together; with several owners, twice as many. `open` and
    `shut` follow the engine: while it is shut nothing starts, and what comes waits its turn unless `reason` says that
    there is nothing to wait for.
    """

    def __init__(self, *, max_requests: int = 128) -> None:
        self._max_requests = max_requests
        self._capacity_tokens = 0
        self._capacity_sequences = 0
        self._block_tokens = 1
        self.used_tokens = 0
        self.used_sequences = 0
        self._is_open = False
        self._refusal: EngineLost | Draining | None = None
        self._waiting: FairQueue[Ticket] = FairQueue()
        self._num_running = 0
        self._num_held: Counter[str] = Counter()  # places by owner: running, waiting and coming
        self._is_admitting = False
        self._mean_service_s = 1.0
        self._beginning: Ticket | None = None  # the slowed one that has not shown yet that it does no harm
        self._rest: asyncio.TimerHandle | None = None
        self._lost_s: float | None = time.monotonic()  # since when `total_lost_s` grows; None while it does not
        self._total_lost_s = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def total_lost_s(self) -> float:
        """How long the engine has been away, or has repeated what it had done before, all in all."""
        return self._total_lost_s + (time.monotonic() - self._lost_s if self._lost_s is not None else 0.0)

    @property
    def is_draining(self) -> bool:
        return isinstance(self._refusal, Draining)

    def open(self, *, capacity_tokens: int, capacity_sequences: int, block_tokens: int) -> None:
        """An engine is there, with room for so much. `caught_up` follows when nothing is left to be repeated."""
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
        if self._lost_s is None:
            self._lost_s = time.monotonic()
        if not isinstance(self._refusal, Draining):
            self._refusal = reason

    def caught_up(self) -> None:
        """What ran when the gate was shut has come to where it was."""
        self._total_lost_s, self._lost_s = self.total_lost_s, None

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

    def check(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        num_sequences: int,
        *,
        owner: str = ANONYMOUS,
        is_slowed: bool = False,
    ) -> int:
        """Whether such a request could ever run here; returns the tokens that it takes. Slowed ones may not take the
        last quarter of the places.

        Raises: ContextLengthExceeded and RequestError if never; QueueFull, Draining, EngineLost if not now.
        """
        self._check_refusal()
        num_tokens = self.demand(num_prompt_tokens, max_tokens, num_sequences)
        self.check_open(owner, is_slowed=is_slowed)
        return num_tokens

    def demand(self, num_prompt_tokens: int, max_tokens: int, num_sequences: int) -> int:
        """The tokens that such a request takes. Raises: ContextLengthExceeded, RequestError if it can never run."""
        # Memory is handed out in blocks, and a sequence's last one is partly empty.
        block = self._block_tokens
        num_blocks = -(-(num_prompt_tokens + max_tokens) // block) + (block > 1)
        num_tokens = num_sequences * num_blocks * block
        if self._capacity_tokens:
            if num_tokens > self._capacity_tokens:
                limit = self._capacity_tokens // num_sequences
                raise ContextLengthExceeded(num_prompt_tokens, limit, max_tokens=max_tokens)
            if num_sequences > self._capacity_sequences:
                raise RequestError(f"n is at most {self._capacity_sequences} here.", param="n")
        return num_tokens

    def check_open(self, owner: str = ANONYMOUS, *, is_slowed: bool = False) -> None:
        """Whether the owner is let in now, whatever they ask. Raises: QueueFull, Draining, EngineLost."""
        self._check_refusal()
        num_places = max(1, 3 * self._max_requests // 4) if is_slowed else self._max_requests
        num_held = self._num_held.total()
        share = num_places // len({owner, *self._num_held})
        if num_held >= num_places and (self._num_held[owner] >= share or num_held >= 2 * num_places):
            raise QueueFull("The model is overloaded.", retry_after_s=self.retry_after_s)

    def _check_refusal(self) -> None:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)  # else it would remember all that it was raised for

    @contextmanager
    def coming(self, owner: str = ANONYMOUS) -> Iterator[None]:
        """Count a request among those that wait while it is being looked at. Raises: as `check_open`."""
        self.check_open(owner)
        self._num_held[owner] += 1
        try:
            yield
        finally:
            self._give_back(owner)

    def enter(self, ticket: Ticket) -> None:
        """Queue a ticket, and start it if its turn has come. Call `check` first, without waiting in between."""
        self._waiting.append(ticket)
        self._num_held[ticket.owner] += 1
        self._admit()
        if ticket.admitted_s is None and ticket.expire is not None:
            last_s = time.monotonic() + ticket.queue_s + _MAX_LOST_S
            self._look_after(ticket.queue_s, ticket, last_s)

    def _look_after(self, wait_s: float, ticket: Ticket, last_s: float) -> None:
        ticket.timer = asyncio.get_running_loop().call_later(wait_s, self._look_at, ticket, self.total_lost_s, last_s)

    def _look_at(self, ticket: Ticket, lost_s: float, last_s: float) -> None:
        """The ticket's time is over, but for what the engine lost of it, which was `lost_s` when the time began. At
        `last_s` it is over in any case."""
        now_lost_s = self.total_lost_s
        left_s = min(max(_MIN_WAIT_S, now_lost_s - lost_s), last_s - time.monotonic())
        if now_lost_s > lost_s and left_s > 0:
            self._look_after(left_s, ticket, last_s)
        elif ticket.expire is not None:
            ticket.expire()

    def num_ahead(self, ticket: Ticket) -> int:
        """How many tickets wait in front of one, going by the turns of their owners; 0 for one that does not wait."""
        return self._waiting.num_ahead(ticket) if ticket.admitted_s is None else 0

    def leave(self, ticket: Ticket) -> None:
        """Give a place back, waiting or running."""
        if ticket.timer is not None:
            ticket.timer.cancel()
        self._give_back(ticket.owner)
        if ticket.admitted_s is None:
            self._waiting.remove(ticket)
        else:
            self.used_tokens -= ticket.num_tokens
            self.used_sequences -= ticket.num_sequences
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

    def _admit(self) -> None:
        if self._is_admitting:  # a ticket left as soon as it was started; the loop below goes on
            return
        self._is_admitting = True
        try:
            while self._is_open and (ticket := self._next()) is not None:
                if self.used_tokens + ticket.num_tokens > self._capacity_tokens:
                    break
                if self.used_sequences + ticket.num_sequences > self._capacity_sequences:
                    break
                self._waiting.take(ticket)
                self.used_tokens += ticket.num_tokens
                self.used_sequences += ticket.num_sequences
                self._num_running += 1
                ticket.admitted_s = time.monotonic()
                if ticket.timer is not None:
                    ticket.timer.cancel()
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

    def _give_back(self, owner: str) -> None:
        self._num_held[owner] -= 1
        if not self._num_held[owner]:
            del self._num_held[owner]

    def _rested(self) -> None:
        self._rest = None
        self._admit()
