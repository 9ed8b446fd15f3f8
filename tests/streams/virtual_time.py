"""An event loop on which time passes only when there is nothing else to do."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar
from unittest.mock import patch

__all__ = ["run", "scenario"]

T = TypeVar("T")

_DEADLOCK_S = 30.0  # of real time, for a scenario in which everybody waits for somebody else


class _Selector(selectors.DefaultSelector):
    """Advances the clock instead of sleeping until the next timer."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is not None:
            self.now_s += timeout
            return []
        ready = super().select(_DEADLOCK_S)
        assert ready, "nothing is left that could wake the loop"
        return ready


def run(main: Coroutine[object, object, T]) -> T:
    """Run a scenario on its own event loop, with one virtual clock for `time.monotonic` and the loop's timers.

    The code under test is unchanged: its timers are the loop's, and run in their order and at their time.
    """
    selector = _Selector()
    with (
        patch.object(time, "monotonic", lambda: selector.now_s),
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner,
    ):
        return runner.run(main)


def scenario(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run the test with virtual time."""

    def run_test() -> None:
        async def main() -> None:
            await test()

        run(main())

    run_test.__name__, run_test.__doc__ = test.__name__, test.__doc__
    return run_test
