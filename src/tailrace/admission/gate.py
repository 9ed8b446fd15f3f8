"""A queue in front of a budget of tokens and sequences. Owners take turns; each owner's requests run in order of
arrival.

The slots for running and queued requests are shared fairly, too. When all slots are taken, an owner who has fewer than
an equal share still gets one. So one owner cannot lock out the others.

*Background* requests wait until no other request does, and have slots of their own. When another request has no room,
they leave the engine to it, the newest first, and wait again (`QueueEntry.preempt`).

Requests of a caller who repeatedly crashes engines are *slowed*. They start one at a time: the next one starts when the
previous one has produced some tokens or has ended. They also wait during a pause (`pause_slowed`), so that running
streams make progress between two crashes. Requests of other callers overtake them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tailrace.admission.queue import FairQueue
from tailrace.errors import SHUTTING_DOWN, ContextLengthExceeded, Draining, EngineLost, QueueFull, RequestError
from tailrace.types import ANONYMOUS

__all__ = ["Asker", "Gate", "QueueEntry"]

_MAX_LOST_S = 300.0  # engine downtime that extends a request's time in the queue at most
_MIN_WAIT_S = 0.25  # shortest extension of a request's time in the queue


class _Asks(Protocol):
    """What the gate reads of a request, of its record and of its entry."""

    @property
    def owner(self) -> str: ...

    @property
    def is_background(self) -> bool: ...


class Asker(NamedTuple):
    """Who asks for a slot, where there is no request."""

    owner: str = ANONYMOUS
    is_background: bool = False


_ANYBODY = Asker()


@dataclass(slots=True, eq=False, repr=False)
class QueueEntry:
    """A request's slot. `start` is called once, when the request may run: inside `Gate.enter`, or later.

    `expire` is called when the request has waited for `queue_s`. Up to five minutes in which the engine is down, or
    replays sequences, do not count.
    """

    num_tokens: int
    num_sequences: int
    start: Callable[[], None]
    owner: str = ANONYMOUS
    is_slowed: bool = False  # its caller repeatedly crashes engines
    is_background: bool = False
    preempt: Callable[[], None] | None = None  # gives the room of a background request back, if it can
    queue_s: float = 0.0
    expire: Callable[[], None] | None = None
    admitted_s: float | None = field(init=False, default=None)  # None: still waiting
    timer: asyncio.TimerHandle | None = field(init=False, default=None)  # while it waits


class Gate:
    """Starts entries while they fit into the budget.

    `max_requests` limits the running and queued requests together; with several owners, up to twice as many are
    possible. `open` and `shut` follow the engine. While the gate is shut nothing starts: new requests are queued, or
    refused if `shut` got a reason.
    """

    def __init__(self, *, max_requests: int = 128) -> None:
        self.max_requests = max_requests
        self.capacity_tokens = 0
        self._capacity_sequences = 0
        self.block_tokens = 1
        self.used_tokens = 0
        self.used_sequences = 0
        self._is_open = False
        self._changed = asyncio.Event()  # for those who wait until it is open
        self.will_drain = False  # requests are still accepted, but no load balancer should send any
        self._refusal: EngineLost | Draining | None = None
        self._waiting: FairQueue[QueueEntry] = FairQueue()
        self._background: FairQueue[QueueEntry] = FairQueue()  # waits behind it
        self._preemptible: dict[QueueEntry, None] = {}  # run in the background, in the order of their starts
        self._num_running = 0
        # Slots by owner: running, queued and `coming` requests; first those that do not run in the background.
        self._num_slots: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._is_admitting = False
        self._mean_service_s = 1.0
        self._unsettled: QueueEntry | None = None  # the slowed entry that runs but is not `settle`d yet
        self._pause_timer: asyncio.TimerHandle | None = None
        self._lost_s: float | None = time.monotonic()  # since when the engine is down or replays; None if it is not
        self._total_lost_s = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._background)

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def kv_usage(self) -> float:
        """Return the share of the KV cache that running requests have reserved, 0 to 1."""
        return self.used_tokens / self.capacity_tokens if self.capacity_tokens else 0.0

    @property
    def total_lost_s(self) -> float:
        """Return the total time in which the engine was down or replayed sequences."""
        return self._total_lost_s + (time.monotonic() - self._lost_s if self._lost_s is not None else 0.0)

    @property
    def is_draining(self) -> bool:
        return isinstance(self._refusal, Draining)

    def open(self, *, capacity_tokens: int, capacity_sequences: int, block_tokens: int) -> None:
        """An engine with this capacity is ready. Call `caught_up` when its replays are done."""
        self.capacity_tokens = capacity_tokens
        self._capacity_sequences = capacity_sequences
        self.block_tokens = block_tokens
        self._is_open = True
        if isinstance(self._refusal, EngineLost):
            self._refusal = None
        self._changed.set()
        self._admit()

    def shut(self, reason: EngineLost | None = None) -> None:
        """The engine is down. With a reason, new requests are refused with it."""
        self._is_open = False
        if self._lost_s is None:
            self._lost_s = time.monotonic()
        if not isinstance(self._refusal, Draining):
            self._refusal = reason
        self._changed.set()

    async def clear(self) -> None:
        """Shut, take background requests off the engine, and return when nothing runs."""
        self.shut()
        for one in reversed(list(self._preemptible)):
            assert one.preempt is not None
            one.preempt()
        while self._num_running:
            self._changed.clear()
            await self._changed.wait()

    async def wait_open(self) -> None:
        """Wait until requests may start. Raises: Draining, EngineLost if they are refused."""
        while not self._is_open:
            self._check_refusal()
            self._changed.clear()
            await self._changed.wait()

    def caught_up(self) -> None:
        """The replays of an engine's crash are done."""
        self._total_lost_s, self._lost_s = self.total_lost_s, None

    def drain(self, retry_after_s: float) -> None:
        """Refuse new requests. Running and queued requests continue."""
        self._refusal = Draining(SHUTTING_DOWN, retry_after_s=retry_after_s)
        self._changed.set()

    def pause_slowed(self, seconds: float) -> None:
        """Start no slowed request for this time. Needs a running event loop."""
        if self._pause_timer is not None:
            self._pause_timer.cancel()
        self._pause_timer = asyncio.get_running_loop().call_later(seconds, self._end_pause)

    def settle(self, entry: QueueEntry) -> None:
        """This slowed request has produced tokens or has ended: let the next one start."""
        if self._unsettled is entry:
            self._unsettled = None
            self._admit()

    def check(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        num_sequences: int,
        by: _Asks = _ANYBODY,
        *,
        is_slowed: bool = False,
    ) -> int:
        """Check that a request can run here, and return its number of tokens. Slowed requests may not take the last
        quarter of the slots.

        Raises: ContextLengthExceeded and RequestError if it can never run; QueueFull, Draining, EngineLost if it cannot
        be queued now.
        """
        self._check_refusal()
        num_tokens = self.demand(num_prompt_tokens, max_tokens, num_sequences)
        self.check_open(by, is_slowed=is_slowed)
        return num_tokens

    def demand(self, num_prompt_tokens: int, max_tokens: int, num_sequences: int) -> int:
        """Return how many tokens a request needs. Raises: ContextLengthExceeded, RequestError if it can never run."""
        # Memory is allocated in blocks, and the last block of a sequence is partly empty.
        block = self.block_tokens
        num_blocks = -(-(num_prompt_tokens + max_tokens) // block) + (block > 1)
        num_tokens = num_sequences * num_blocks * block
        if self.capacity_tokens:
            if num_tokens > self.capacity_tokens:
                limit = self.capacity_tokens // num_sequences
                raise ContextLengthExceeded(num_prompt_tokens, limit, max_tokens=max_tokens)
            if num_sequences > self._capacity_sequences:
                raise RequestError(f"n must be at most {self._capacity_sequences} here.", param="n")
        return num_tokens

    def check_open(self, by: _Asks = _ANYBODY, *, is_slowed: bool = False) -> None:
        """Check that an owner may queue a request now, whatever its size. Raises: QueueFull, Draining, EngineLost."""
        self._check_refusal()
        num_slots = max(1, 3 * self.max_requests // 4) if is_slowed else self.max_requests
        used = self._num_slots[by.is_background]
        num_used = used.total()
        share = num_slots // len({by.owner, *used})
        if num_used >= num_slots and (used[by.owner] >= share or num_used >= 2 * num_slots):
            raise QueueFull("The model is overloaded.", retry_after_s=self.retry_after_s)

    def _check_refusal(self) -> None:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)  # otherwise its traceback would grow with each raise

    @contextmanager
    def coming(self, by: _Asks = _ANYBODY) -> Iterator[None]:
        """Reserve a slot while a request is parsed and checked, before `enter`. Raises: as `check_open`."""
        self.check_open(by)
        self._num_slots[by.is_background][by.owner] += 1
        try:
            yield
        finally:
            self._release_slot(by)

    def enter(self, entry: QueueEntry) -> None:
        """Queue a entry, and start it if it is its turn. Call `check` immediately before, without an await in
        between."""
        self._queue_of(entry).append(entry)
        self._num_slots[entry.is_background][entry.owner] += 1
        self._admit()
        if entry.admitted_s is None and entry.expire is not None:
            last_s = time.monotonic() + entry.queue_s + _MAX_LOST_S
            self._start_timer(entry.queue_s, entry, last_s)

    def _start_timer(self, wait_s: float, entry: QueueEntry, last_s: float) -> None:
        entry.timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer, entry, self.total_lost_s, last_s)

    def _on_timer(self, entry: QueueEntry, lost_s: float, last_s: float) -> None:
        """Expire a entry, or extend its wait by the engine's downtime since `total_lost_s` was `lost_s`. It expires at
        `last_s` (monotonic) at the latest."""
        now_lost_s = self.total_lost_s
        left_s = min(max(_MIN_WAIT_S, now_lost_s - lost_s), last_s - time.monotonic())
        if now_lost_s > lost_s and left_s > 0:
            self._start_timer(left_s, entry, last_s)
        elif entry.expire is not None:
            entry.expire()

    def num_ahead(self, entry: QueueEntry) -> int:
        """Return how many queued entries have their turn before this one; 0 if it is not queued."""
        if entry.admitted_s is not None:
            return 0
        return self._queue_of(entry).num_ahead(entry) + (len(self._waiting) if entry.is_background else 0)

    def leave(self, entry: QueueEntry) -> None:
        """Free the slot of a queued or running request."""
        if entry.timer is not None:
            entry.timer.cancel()
        self._release_slot(entry)
        if entry.admitted_s is None:
            self._queue_of(entry).remove(entry)
        else:
            self._preemptible.pop(entry, None)
            self.used_tokens -= entry.num_tokens
            self.used_sequences -= entry.num_sequences
            self._num_running -= 1
            self._mean_service_s += 0.1 * (time.monotonic() - entry.admitted_s - self._mean_service_s)
        if self._unsettled is entry:
            self._unsettled = None
        self._changed.set()
        self._admit()

    @property
    def retry_after_s(self) -> float:
        """Return an estimate of when a slot becomes free, from the recent duration of requests."""
        share = (len(self._waiting) + 1) / max(1, self._num_running)
        return min(30.0, max(1.0, self._mean_service_s * share))

    def _admit(self) -> None:
        if self._is_admitting:  # called by a entry that ended in `start`; the outer loop continues
            return
        self._is_admitting = True
        try:
            while self._is_open and (entry := self._next()) is not None:
                if not self._fits(entry):
                    self._make_room(entry)
                    if not self._fits(entry):
                        break
                self._queue_of(entry).take(entry)
                self.used_tokens += entry.num_tokens
                self.used_sequences += entry.num_sequences
                self._num_running += 1
                entry.admitted_s = time.monotonic()
                if entry.timer is not None:
                    entry.timer.cancel()
                if entry.is_slowed:
                    self._unsettled = entry
                if entry.preempt is not None:
                    self._preemptible[entry] = None
                entry.start()
        finally:
            self._is_admitting = False

    def _next(self) -> QueueEntry | None:
        """Return the first queued entry that may start now."""
        is_paused = self._pause_timer is not None and self._num_running > 0  # a pause only protects running streams
        may_slowed_begin = self._unsettled is None and not is_paused
        queued = itertools.chain(self._waiting, self._background)
        return next((entry for entry in queued if may_slowed_begin or not entry.is_slowed), None)

    def _queue_of(self, entry: QueueEntry) -> FairQueue[QueueEntry]:
        return self._background if entry.is_background else self._waiting

    def _fits(self, entry: QueueEntry, given: Sequence[QueueEntry] = ()) -> bool:
        """Return whether there is room for an entry, if others give theirs."""
        num_tokens = self.used_tokens + entry.num_tokens - sum(one.num_tokens for one in given)
        num_sequences = self.used_sequences + entry.num_sequences - sum(one.num_sequences for one in given)
        return num_tokens <= self.capacity_tokens and num_sequences <= self._capacity_sequences

    def _make_room(self, entry: QueueEntry) -> None:
        """Take background requests off the engine, the newest first, if that makes room for an entry before them."""
        if entry.is_background or not self._fits(entry, list(self._preemptible)):
            return
        for one in reversed(list(self._preemptible)):
            if self._fits(entry):
                return
            assert one.preempt is not None
            one.preempt()

    def _release_slot(self, by: _Asks) -> None:
        slots = self._num_slots[by.is_background]
        slots[by.owner] -= 1
        if not slots[by.owner]:
            del slots[by.owner]

    def _end_pause(self) -> None:
        self._pause_timer = None
        self._admit()
