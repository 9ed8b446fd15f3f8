"""An asyncio loop that runs inside an engine's `step`, for what can only be heard through one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

__all__ = ["InnerLoop"]

_Found = TypeVar("_Found")


class InnerLoop:
    """Carries one task a sequence. Nothing moves in it but while one of its methods runs."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._leaving: set[asyncio.Task[None]] = set()
        self._is_running = False

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def begin(self, follow: Coroutine[object, object, None]) -> asyncio.Task[None]:
        return self._loop.create_task(follow)

    def run(self, timeout_s: float) -> None:
        """Until a task calls `tell`, or for so long."""
        timer = self._loop.call_later(timeout_s, self._loop.stop)
        self._is_running = True
        self._loop.run_forever()
        self._is_running = False
        timer.cancel()

    def tell(self) -> None:
        """There is news: whoever runs the loop may go on."""
        if self._is_running:
            self._loop.stop()

    def complete(self, work: Coroutine[object, object, _Found]) -> _Found:
        """Run it to its end, however long that takes."""
        return self._loop.run_until_complete(work)

    def leave(self, task: asyncio.Task[None]) -> None:
        """Nobody waits for it any more: its sequence has ended."""
        if not task.done():
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    def see_off(self, timeout_s: float) -> None:
        """Give those that leave so long to put away what they hold."""
        if self._leaving:
            self._loop.run_until_complete(asyncio.wait([*self._leaving], timeout=timeout_s))

    def close(self) -> None:
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
