"""The loop inside of a step."""

from __future__ import annotations

import asyncio
import os
import select
import threading

from tests.waiting import LONG_S

from tailrace.engines import Delta
from tailrace_kit.inner_loop import InnerLoop


class _Run:
    """A sequence that waits."""

    is_aborted = False
    task: asyncio.Task[None]

    def take(self) -> Delta | None:
        return None


def test_a_descriptor_ends_a_run_that_waits() -> None:
    loop: InnerLoop[_Run] = InnerLoop()
    reading, writing = os.pipe()
    loop.return_for(reading)
    loop.begin(1, _Run(), asyncio.sleep(4 * LONG_S))
    running = threading.Thread(target=loop.run, args=(4 * LONG_S,), daemon=True)
    running.start()
    os.write(writing, b"work")
    running.join(LONG_S)
    assert not running.is_alive()
    assert select.select([reading], [], [], 0)[0], "the loop reads nothing itself"
    loop.cancel_all(LONG_S)
    loop.close()
    os.close(reading)
    os.close(writing)
