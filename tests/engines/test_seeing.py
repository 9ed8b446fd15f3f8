"""Questions to an engine how an image is written: answered, refused, and without an engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from tests.seeing import picture

from tailrace.engines import EngineSpec
from tailrace.engines.scripted.engine import PLACEHOLDER
from tailrace.engines.supervisor import Supervisor
from tailrace.errors import EngineLost


@contextlib.asynccontextmanager
async def _running() -> AsyncIterator[tuple[Supervisor, asyncio.Event]]:
    changed = asyncio.Event()
    supervisor = Supervisor(EngineSpec("scripted"), on_change=changed.set)
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
