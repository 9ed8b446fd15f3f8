"""Turns of owners at work that few can do at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator

from tailrace.errors import QueueFull

__all__ = ["OwnerTurns"]


class OwnerTurns:
    """At most `most` turns at once, of one owner at most `most_of_owner`. However many an owner waits for, another
    owner's first one comes next. For one event loop."""

    def __init__(self, most: int, most_of_owner: int | None = None) -> None:
        self._most = most
        self._most_of_owner = most if most_of_owner is None else most_of_owner
        self._running: Counter[str] = Counter()  # turns, by owner
        self._num_turns = 0
        self._last_turns: dict[str, int] = {}  # the numbers of the last turns of owners who have one or wait
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, owner: str, within_s: float | None = None) -> AsyncIterator[None]:
        """Wait for a turn, and have it until the context ends. Raises: TimeoutError after `within_s` seconds."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(granted)
        self._grant()
        try:
            async with asyncio.timeout(within_s):
                await granted
        except BaseException:
            if granted.done() and not granted.cancelled():
                self._end(owner)
            elif granted in self._waiting.get(owner, ()):
                self._leave(owner, granted)
            raise
        try:
            yield
        finally:
            self._end(owner)

    @contextlib.asynccontextmanager
    async def turn_or_refusal(self, owner: str, within_s: float, refusal: str) -> AsyncIterator[None]:
        """As `turn`. Raises: QueueFull with this message if the turn does not come in time."""
        async with contextlib.AsyncExitStack() as held:
            try:
                await held.enter_async_context(self.turn(owner, within_s))
            except TimeoutError:
                raise QueueFull(refusal, retry_after_s=1.0) from None
            yield

    def _grant(self) -> None:
        while self._running.total() < self._most:
            may_run = [one for one in self._waiting if self._running[one] < self._most_of_owner]
            if not may_run:
                return
            owner = min(may_run, key=lambda one: self._last_turns.get(one, 0))
            granted = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if not granted.done():  # whoever waited for it has not left at this moment
                granted.set_result(None)
                self._running[owner] += 1
                self._num_turns += 1
                self._last_turns[owner] = self._num_turns

    def _end(self, owner: str) -> None:
        self._running[owner] -= 1
        self._grant()
        self._forget(owner)

    def _leave(self, owner: str, granted: asyncio.Future[None]) -> None:
        self._waiting[owner].remove(granted)
        if not self._waiting[owner]:
            del self._waiting[owner]
        self._forget(owner)

    def _forget(self, owner: str) -> None:
        """Forget an owner who neither has a turn nor waits for one."""
        if not self._running[owner]:
            del self._running[owner]
            if owner not in self._waiting:
                self._last_turns.pop(owner, None)
