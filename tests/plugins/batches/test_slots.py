"""Owners have equal shares of the slots for rows, and their batches begin in order."""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.waiting import idle, turn

from tailrace_plugins.batches.slots import RowQueue, Slots


async def _read(queue: RowQueue, num_rows: int, begun: list[RowQueue]) -> None:
    for _ in range(num_rows):
        await queue.take()
        queue.use()
        begun.append(queue)
        await turn()  # it reads the next row
    queue.leave()


async def test_owners_with_many_batches_have_the_same_share() -> None:
    slots, begun, ended = Slots(16, lambda owner: True), list[RowQueue](), 0
    queues = [RowQueue(slots, "many", (number, "")) for number in range(100)]
    async with asyncio.TaskGroup() as group:
        for queue in (*queues, RowQueue(slots, "one", (200, ""))):
            group.create_task(_read(queue, 100 if queue.owner == "one" else 1, begun))
        while len(begun) < 200:
            await idle()
            if len(begun) in (16, 64, 96):
                assert set(Counter(one.owner for one in begun[-16:]).values()) == {8}
            running, ended = begun[ended:], len(begun)
            for queue in running:  # all at once, as in a step of the engine
                queue.give_back()
    assert [one for one in begun if one.owner == "many"] == queues


async def test_owners_take_turns_when_there_are_fewer_slots() -> None:
    slots, begun = Slots(1, lambda owner: True), list[RowQueue]()
    async with asyncio.TaskGroup() as group:
        for owner in ("a", "a", "b"):
            group.create_task(_read(RowQueue(slots, owner, (0, "")), 3, begun))
        for _ in range(9):
            await idle()
            begun[-1].give_back()
    assert "".join(one.owner for one in begun) == "aabababaa"


async def test_an_owner_without_room_lets_others_begin() -> None:
    full = {"a"}
    slots, begun = Slots(2, lambda owner: owner not in full), list[RowQueue]()
    async with asyncio.TaskGroup() as group:
        for owner in "ab":
            group.create_task(_read(RowQueue(slots, owner, (0, "")), 1, begun))
        await idle()
        assert [one.owner for one in begun] == ["b"]
        full.clear()
        slots.offer()
    assert [one.owner for one in begun] == ["b", "a"]


async def test_a_batch_that_is_cancelled_has_no_slot() -> None:
    slots, begun = Slots(1, lambda owner: True), list[RowQueue]()
    first, second, third = (RowQueue(slots, "a", (number, "")) for number in range(3))
    await first.take()
    first.use()
    waiting = [asyncio.create_task(_read(queue, 1, begun)) for queue in (second, third)]
    await idle()
    first.leave()
    first.give_back()  # to the second, which is cancelled before it knows
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    second.leave()
    await waiting[1]
    assert begun == [third]


async def test_a_row_that_waits_leaves_its_slot_to_other_owners() -> None:
    slots = Slots(1, lambda owner: True)
    waiting, other = RowQueue(slots, "a", (0, "")), RowQueue(slots, "b", (0, ""))
    await waiting.take()
    waiting.use()
    pause = asyncio.create_task(waiting.pause(0))
    await other.take()
    other.use()
    next_row = asyncio.create_task(waiting.take())
    await idle()
    other.give_back()
    await pause
    await idle()
    assert not next_row.done()  # the row has the slot again
    waiting.give_back()
    await next_row


async def test_no_row_begins_while_another_of_its_owner_waits() -> None:
    slots = Slots(2, lambda owner: True)
    first, second, other = (RowQueue(slots, owner, (0, "")) for owner in ("a", "a", "b"))
    await first.take()
    first.use()
    first.leave()  # it has no other row
    pause = asyncio.create_task(first.pause(3600))
    next_row = asyncio.create_task(second.take())
    await other.take()
    await idle()
    assert not next_row.done()
    pause.cancel()
    await asyncio.wait([pause])
    first.give_back()
    await next_row


async def test_a_row_that_is_cancelled_while_it_waits_for_its_slot() -> None:
    slots = Slots(1, lambda owner: True)
    waiting, other = RowQueue(slots, "a", (0, "")), RowQueue(slots, "b", (0, ""))
    await waiting.take()
    waiting.use()
    waiting.leave()
    pause = asyncio.create_task(waiting.pause(0))
    await other.take()
    other.use()
    other.leave()
    await idle()
    pause.cancel()
    await asyncio.wait([pause])
    waiting.give_back()
    other.give_back()
    await other.take()
    third = asyncio.create_task(waiting.take())
    await idle()
    assert not third.done()  # there is still one slot
    other.use()
    other.leave()
    other.give_back()
    await third


async def test_another_number_of_slots() -> None:
    """Rows that run go on; with fewer slots, others begin when enough of them have ended."""
    slots, begun = Slots(1, lambda owner: True), list[RowQueue]()
    async with asyncio.TaskGroup() as group:
        for owner in "abcde":
            group.create_task(_read(RowQueue(slots, owner, (0, "")), 1, begun))
        for num_slots, num_begun in ((1, 1), (3, 3), (2, 3)):
            slots.resize(num_slots)
            await idle()
            assert len(begun) == num_begun
        for num_begun in (3, 4, 5):
            begun[0].give_back()
            await idle()
            assert len(begun) == num_begun
