"""Turns of owners: few at once, one after the other, also when those who wait leave."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.waiting import turn

from tailrace.images.owner_turns import OwnerTurns


async def test_owners_take_turns() -> None:
    turns, order = OwnerTurns(1), list[str]()

    async def work(owner: str) -> None:
        async with turns.turn(owner):
            order.append(owner)
            await turn(3)

    async with asyncio.TaskGroup() as group:
        for owner in "aaaaabbc":
            group.create_task(work(owner))
    assert "".join(order) == "abcabaaa"


async def test_an_owner_has_only_a_share() -> None:
    turns = OwnerTurns(3, 2)
    async with turns.turn("a"), turns.turn("a"):
        with pytest.raises(TimeoutError):
            async with turns.turn("a", 0.01):
                raise AssertionError
        async with turns.turn("b", 0):
            pass
    async with turns.turn("a", 0), turns.turn("b", 0), turns.turn("c", 0):
        pass


async def test_who_leaves_takes_no_turn_away() -> None:
    """Whatever happens to those who wait, nobody has two turns at once, and the last one still gets one."""
    chance = random.Random(7)
    turns, at_once = OwnerTurns(2), 0

    async def work(owner: str) -> None:
        nonlocal at_once
        async with turns.turn(owner, chance.choice([None, 0.001])):
            at_once += 1
            try:
                assert at_once <= 2
                await turn(chance.randrange(3))
            finally:
                at_once -= 1

    tasks = [asyncio.create_task(work(chance.choice("abc"))) for _ in range(300)]
    for task in chance.sample(tasks, 100):
        await turn(chance.randrange(2))
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(one) for one in results} <= {type(None), TimeoutError, asyncio.CancelledError}
    async with turns.turn("a", 0), turns.turn("b", 0):
        pass
