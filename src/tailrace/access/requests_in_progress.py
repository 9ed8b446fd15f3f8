"""The requests in progress by key, which are cancelled when their key is revoked."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

__all__ = ["CANCEL_DELAY_S", "RequestsInProgress"]

# Streams of a revoked key end at once, with an error in the form of their wire. Requests that are still open after this
# time are cancelled.
CANCEL_DELAY_S = 0.3


class RequestsInProgress:
    """The tasks that answer requests, by key. They are cancelled shortly after their key is revoked."""

    def __init__(self) -> None:
        self._open: defaultdict[str, set[asyncio.Task[Any]]] = defaultdict(set)  # Any: of any result
        self._cancelled: WeakSet[asyncio.Task[Any]] = WeakSet()

    @contextmanager
    def register(self, key_id: str) -> Iterator[None]:
        """Register the running task under a key for the time of the block; "" is no key."""
        task = asyncio.current_task()
        if not key_id or task is None:
            yield
            return
        self._open[key_id].add(task)
        try:
            yield
        finally:
            self._open[key_id].discard(task)
            if not self._open[key_id]:
                del self._open[key_id]

    def cancel_soon(self, key_id: str) -> None:
        """Cancel the requests of a key in a moment."""
        asyncio.get_running_loop().call_later(CANCEL_DELAY_S, self._cancel, key_id)

    def was_cancelled(self) -> bool:
        """Return whether the running task was cancelled because of its key, and clear the cancellation."""
        task = asyncio.current_task()
        if task is None or task not in self._cancelled:
            return False
        task.uncancel()
        return True

    def _cancel(self, key_id: str) -> None:
        for task in self._open.get(key_id, ()):
            self._cancelled.add(task)
            task.cancel("its key was revoked")
