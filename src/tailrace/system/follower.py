"""The wait of a reader for what comes next, the same for streams of tokens and for what extensions follow."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Self

__all__ = ["Follower"]


class Follower(ABC):
    """Follows something that grows, from a cursor. A context manager: it follows while it is open."""

    __slots__ = ("_wakeup", "cursor")

    def __init__(self, cursor: int) -> None:
        self._wakeup: asyncio.Future[None] | None = None
        self.cursor = cursor

    @abstractmethod
    def __enter__(self) -> Self: ...
    @abstractmethod
    def __exit__(self, *exc_info: object) -> None: ...
    @abstractmethod
    def waiting(self) -> dict[Self, None] | None:
        """Return where those wait that are to be woken by what this one needs; None if it need not wait."""

    async def wait(self, at_most_s: float = 0.0) -> None:
        """Return when something has come after the cursor, when no more will come, when `wake` was called, or after
        `at_most_s` (0: no limit).

        Cancellation: leaves the follower as it was.
        """
        waiting = self.waiting()
        if waiting is None:
            return
        loop = asyncio.get_running_loop()
        self._wakeup = loop.create_future()
        timer = loop.call_later(at_most_s, self.wake) if at_most_s else None
        waiting[self] = None
        try:
            await self._wakeup
        finally:
            self._wakeup = None
            waiting.pop(self, None)
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        """Make a `wait` in progress return."""
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)
