"""Functions that wait for a condition. None of them waits for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sized

__all__ = ["LONG_S", "idle", "turn", "until", "wait_until"]

LONG_S = 120.0  # less than a test may take, so that it fails here and says what did not come
_MOST_PAUSE_S = 0.03  # between two questions, which may be requests: what is waited for needs the processor, too


def until(condition: Callable[[], bool], *, timeout_s: float = LONG_S) -> None:
    """Poll until a state of another thread or process is reached.

    Raises: AssertionError after `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    pause_s = 0.005
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to that"
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _MOST_PAUSE_S)


async def wait_until(condition: Callable[[], bool], *, timeout_s: float = LONG_S) -> None:
    """As `until`, without blocking the event loop."""
    deadline_s = time.monotonic() + timeout_s
    pause_s = 0.002
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to that"
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _MOST_PAUSE_S)


async def idle() -> None:
    """Wait until every task of this event loop waits for something outside of it: a timer, another thread, another
    process or the test."""
    callbacks: Sized = vars(asyncio.get_running_loop())["_ready"]
    while True:
        await asyncio.sleep(0)  # in which sockets are asked, too
        if not callbacks:
            return


async def turn(count: int = 1) -> None:
    """Run this many turns of the event loop, for tests that suspend code or count its turns.

    It is not a way to wait for a condition.
    """
    for _ in range(count):
        await asyncio.sleep(0)
