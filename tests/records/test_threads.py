"""A call that never returns does not block other calls."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from tailrace.errors import StorageError
from tailrace.records.threads import DatabaseThreads


async def test_results_and_errors_come_back() -> None:
    threads = DatabaseThreads(2)
    assert await asyncio.gather(*(threads.run(partial(abs, -n)) for n in range(20))) == list(range(20))

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await threads.run(fail)


async def test_a_hanging_call_times_out_and_others_continue() -> None:
    threads, never = DatabaseThreads(2), threading.Event()
    with pytest.raises(StorageError, match="did not answer in time"):
        await threads.run(never.wait, within_s=0.01)
    assert await threads.run(lambda: 1) == 1
    never.set()


async def test_a_cancelled_call_is_not_started() -> None:
    threads, begun, goes_on = DatabaseThreads(1), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        goes_on.wait()

    calls: list[int] = []
    first = asyncio.create_task(threads.run(hold, within_s=None))
    await asyncio.to_thread(begun.wait)
    with pytest.raises(StorageError):
        await threads.run(lambda: calls.append(1), within_s=0.01)
    goes_on.set()
    await first
    assert await threads.run(lambda: 2) == 2
    assert calls == []
