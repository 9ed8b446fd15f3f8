"""Questions to an engine how an image is written: answered, refused, and without an engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from tests.seeing import picture
from tests.waiting import turn

from tailrace.engines import EngineSpec
from tailrace.engines.supervisor import Supervisor
from tailrace.errors import EngineLost
from tailrace_outer.scripted.scripted_engine import PLACEHOLDER, STALL_SIZE


@contextlib.asynccontextmanager
async def _running(stall_s: float = 30.0) -> AsyncIterator[tuple[Supervisor, asyncio.Event]]:
    changed = asyncio.Event()
    supervisor = Supervisor(EngineSpec("scripted"), on_change=changed.set, stall_s=stall_s)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(supervisor.run())
        yield supervisor, changed
        running.cancel()


async def test_an_engine_says_how_an_image_is_written() -> None:
    async with _running() as (supervisor, changed):
        with pytest.raises(EngineLost):
            await supervisor.see(picture(1))  # it is loading
        await changed.wait()
        seen = await asyncio.gather(*(supervisor.see(picture(1, 32 * size, 32)) for size in (1, 2, 3)))
        assert [one.expansion for one in seen] == [PLACEHOLDER, PLACEHOLDER * 2, PLACEHOLDER * 3]
        assert {one.placeholder for one in seen} == {PLACEHOLDER}


async def test_an_engine_that_dies_of_an_image_answers_nothing_and_is_replaced() -> None:
    async with _running() as (supervisor, changed):
        await changed.wait()
        with pytest.raises(EngineLost, match="while it read an image") as caught:
            await supervisor.see(b"no PNG")
        assert caught.value.retry_after_s
        while not supervisor.is_ready or not supervisor.restarts:
            changed.clear()
            await changed.wait()
        assert (await supervisor.see(picture(1, 32, 32))).expansion == PLACEHOLDER


@pytest.mark.parametrize("waits", [True, False])
async def test_an_engine_that_hangs_in_an_image_is_replaced(*, waits: bool) -> None:
    """No sequence runs. Whoever asked may have left."""
    async with asyncio.timeout(100), _running(stall_s=1.0) as (supervisor, changed):
        await changed.wait()
        asking = asyncio.create_task(supervisor.see(picture(1, *STALL_SIZE)))
        if waits:
            with pytest.raises(EngineLost, match="while it read an image") as caught:
                await asking
            assert caught.value.is_crash
        else:
            await turn(1)
            asking.cancel()
        while not supervisor.is_ready or not supervisor.restarts:
            changed.clear()
            await changed.wait()
        assert "no progress" in supervisor.last_reason
        assert (await supervisor.see(picture(1, 32, 32))).expansion == PLACEHOLDER
