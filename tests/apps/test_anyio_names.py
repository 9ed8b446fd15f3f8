from __future__ import annotations

import asyncio
import threading

import anyio.to_thread
from tests.compat.checked import check_versions
from tests.waiting import LONG_S

from tailrace_outer.apps.anyio_names import task_in_thread


def test_versions() -> None:
    check_versions("anyio", "4.10", "4.16", tests="tests/serve tests/apps")


async def test_a_task_that_waits_for_a_thread_is_found() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        may_end.wait(LONG_S)
        return "done"

    async def route() -> str:
        return await anyio.to_thread.run_sync(work)

    task = asyncio.create_task(route())
    await asyncio.to_thread(begun.wait, LONG_S)
    try:
        waiting = task_in_thread(task)
        assert waiting is not None
    finally:
        may_end.set()
    assert await task == "done"
    assert await waiting == "done"
    assert task_in_thread(task) is None


async def test_other_tasks_are_not() -> None:
    event = asyncio.Event()
    task = asyncio.create_task(event.wait())
    await asyncio.wait([task], timeout=0)
    assert task_in_thread(task) is None
    event.set()
    await task
