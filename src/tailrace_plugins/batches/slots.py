"""Which row begins next: a free slot goes to the owner with the fewest rows that run, and to the oldest of their
batches."""

from __future__ import annotations

import asyncio
import bisect
import logging
from collections import Counter
from collections.abc import Callable

__all__ = ["RowQueue", "Slots"]

logger = logging.getLogger("tailrace.batches")


class RowQueue:
    """The place of one batch, which reads its rows one after the other. Batches of an owner are in order of `age`."""

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

    def leave(self) -> None:
        """The batch begins no more rows."""
        self._slots.leave(self)
        if self.has_slot:
            self.has_slot = False
            self.give_back()


class Slots:
    """The slots of all rows. `has_room` says whether the results of an owner may be kept."""

    def __init__(self, num_slots: int, has_room: Callable[[str], bool]) -> None:
        self._num_free = num_slots
        self._has_room = has_room
        self._running: Counter[str] = Counter()
        self._full: set[str] = set()  # owners without room, of which the log knows
        self._queues: dict[str, list[RowQueue]] = {}  # of owners, who take turns; those that had a slot are last

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

    def offer(self) -> None:
        """Give the free slots to those who are next. Call this when an owner may have more room, too."""
        while self._num_free:
            fewest_first = sorted(self._queues, key=self._running.__getitem__)
            owner = next(filter(self._may_begin, fewest_first), None)
            if owner is None:
                return
            queue = self._queues[owner][0]
            if queue.turn is None or queue.turn.done():
                return  # it comes back with its next row, or leaves
            queue.has_slot = True
            queue.turn.set_result(None)
            self._num_free -= 1
            self._running[owner] += 1
            self._queues[owner] = self._queues.pop(owner)

    def _may_begin(self, owner: str) -> bool:
        if self._has_room(owner):
            self._full.discard(owner)
            return True
        if owner not in self._full:
            self._full.add(owner)
            logger.warning("Rows of a batch wait for space: files must be deleted, or --batch-bytes raised.")
        return False
