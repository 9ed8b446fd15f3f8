"""Which row begins next: a free slot goes to the owner with the fewest rows that run, and to the oldest of their
batches. Rows that are refused for now wait without a slot, and meanwhile no other row of their owner begins."""

from __future__ import annotations

import asyncio
import bisect
import logging
from collections import Counter, deque
from collections.abc import Callable

__all__ = ["RowQueue", "Slots"]

logger = logging.getLogger("tailrace.batches")


class RowQueue:
    """The turn of one batch, which reads its rows one after the other. Batches of an owner are in order of `age`."""

    def __init__(self, slots: Slots, owner: str, age: tuple[int, str]) -> None:
        self.owner = owner
        self.age = age
        self.turn: asyncio.Future[None] | None = None  # done while the batch reads its next row
        self.has_slot = False  # for a row that has not begun
        self._slots = slots

    async def take(self) -> None:
        """Return when there is a slot for the next row."""
        self._slots.join(self)
        self.turn = asyncio.get_running_loop().create_future()
        self._slots.offer()
        await self.turn

    def use(self) -> None:
        """The row begins."""
        self.has_slot = False

    def give_back(self) -> None:
        """A row has ended."""
        self._slots.give_back(self.owner)

    async def pause(self, seconds: float) -> None:
        """A row waits without its slot, and gets one again."""
        await self._slots.pause(self.owner, seconds)

    def leave(self) -> None:
        """The batch begins no more rows."""
        self._slots.leave(self)
        if self.has_slot:
            self.has_slot = False
            self.give_back()


class Slots:
    """The slots of all rows. `has_room` says whether the results of an owner may be kept."""

    def __init__(self, num_slots: int, has_room: Callable[[str], bool]) -> None:
        self._num_slots = self._num_free = num_slots  # less than 0 are free while there were more
        self._has_room = has_room
        self._running: Counter[str] = Counter()
        self._num_paused: Counter[str] = Counter()  # rows without a slot
        self._returning: dict[str, deque[asyncio.Future[None]]] = {}  # those that want one again
        self._full: set[str] = set()  # owners without room, of which the log knows
        self._queues: dict[str, list[RowQueue]] = {}  # of owners, who take turns; those that had a slot are last

    def resize(self, num_slots: int) -> None:
        """Have another number of slots. Rows that run go on."""
        self._num_free += num_slots - self._num_slots
        self._num_slots = num_slots
        self.offer()

    def join(self, queue: RowQueue) -> None:
        queues = self._queues.setdefault(queue.owner, [])
        if queue not in queues:
            bisect.insort(queues, queue, key=lambda one: one.age)

    def leave(self, queue: RowQueue) -> None:
        queues = self._queues.get(queue.owner, [])
        if queue in queues:
            queues.remove(queue)
            if not queues:
                del self._queues[queue.owner]
            self.offer()

    def give_back(self, owner: str) -> None:
        self._num_free += 1
        self._running[owner] -= 1
        self.offer()

    async def pause(self, owner: str, seconds: float) -> None:
        """Give a slot back, and take one again after this time. A row that is cancelled has one, too."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_paused[owner] += 1
        self.give_back(owner)
        try:
            await asyncio.sleep(seconds)
            self._returning.setdefault(owner, deque()).append(turn)
            self.offer()
            await turn
        finally:
            if not turn.done() or turn.cancelled():
                self._forget(owner, turn)
                self._take(owner)
            self._num_paused[owner] -= 1
            self.offer()

    def _forget(self, owner: str, turn: asyncio.Future[None]) -> None:
        turns = self._returning.get(owner, deque())
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self._returning.pop(owner, None)

    def _take(self, owner: str) -> None:
        self._num_free -= 1
        self._running[owner] += 1

    def offer(self) -> None:
        """Give the free slots to those who are next. Call this when an owner may have more room, too."""
        while self._num_free > 0:
            fewest_first = sorted({**self._queues, **self._returning}, key=self._running.__getitem__)
            owner = next(filter(self._may_run, fewest_first), None)
            if owner is None:
                return
            if owner in self._returning:
                turn = self._returning[owner][0]
                self._forget(owner, turn)
                if not turn.done():
                    turn.set_result(None)
                    self._take(owner)
                continue
            queue = self._queues[owner][0]
            if queue.turn is None or queue.turn.done():
                return  # it comes back with its next row, or leaves
            queue.has_slot = True
            queue.turn.set_result(None)
            self._take(owner)
            self._queues[owner] = self._queues.pop(owner)

    def _may_run(self, owner: str) -> bool:
        if owner in self._returning:
            return True
        if self._num_paused[owner]:
            return False
        if self._has_room(owner):
            self._full.discard(owner)
            return True
        if owner not in self._full:
            self._full.add(owner)
            logger.warning("Rows of a batch wait for space: files must be deleted, or --batch-bytes raised.")
        return False
