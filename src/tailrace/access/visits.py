"""Requests in progress, by key, so that they end with it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

__all__ = ["Visits"]

# Streams that were begun with the key end at once, in the way of their wire. What is still open then is cut off.
_GRACE_S = 0.3


class Visits:
    """Tasks that answer a request. They are cancelled a moment after their key was revoked."""

    def __init__(self) -> None:
        self._open: defaultdict[str, set[asyncio.Task[Any]]] = defaultdict(set)  # Any: of any result
        self._ended: WeakSet[asyncio.Task[Any]] = WeakSet()

    @contextmanager
    def of(self, key_id: str) -> Iterator[None]:
        """The running task answers a request with this key; "" is none."""
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

    def end(self, key_id: str) -> None:
        """Cancel what is still open with this key after a moment."""
        asyncio.get_running_loop().call_later(_GRACE_S, self._cancel, key_id)

    def was_ended(self) -> bool:
        """Whether the running task was cancelled because of its key."""
        task = asyncio.current_task()
        if task is None or task not in self._ended:
            return False
        task.uncancel()
        return True

    def _cancel(self, key_id: str) -> None:
        for task in self._open.get(key_id, ()):
            self._ended.add(task)
            task.cancel("its key was revoked")
