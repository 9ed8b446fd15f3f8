"""Functions that wait for a condition. None of them sleeps for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sized

__all__ = ["LONG_S", "idle", "turn", "until", "wait_until"]

LONG_S = 120.0  # less than a test may take, so that it fails here and says what did not come


def until(condition: Callable[[], bool], *, timeout_s: float = LONG_S) -> None:
    """Poll for a state of another thread or process.

    Raises: AssertionError if it does not come.
    """
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to that"
        time.sleep(0.005)


async def wait_until(condition: Callable[[], bool], *, timeout_s: float = LONG_S) -> None:
    """As `until`, without blocking the event loop."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to that"
        await asyncio.sleep(0.002)


async def idle() -> None:
    """Wait until this event loop has nothing left to do by itself: every task waits for something from outside, which
    is a timer, another thread, another process or the test."""
    callbacks: Sized = vars(asyncio.get_running_loop())["_ready"]
    while True:
        await asyncio.sleep(0)  # in which sockets are asked, too
        if not callbacks:
            return


async def turn(count: int = 1) -> None:
    """So many turns of the event loop: for code under test that is to be suspended, or to count them meanwhile.

    It is not long enough for anything that is waited for.
    """
    for _ in range(count):
        await asyncio.sleep(0)
