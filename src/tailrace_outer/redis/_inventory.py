"""Compares the streams that Redis lists as this server's with those that this server has.

They differ if Redis has lost something, as in a failover, and if a command arrives after this server has given it up: a
stream may be missing there, may lack its end, or nobody here may know of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tailrace.streams.log import StreamLog
from tailrace_outer.redis._finished import FinishedStreams
from tailrace_outer.redis._members import Members
from tailrace_outer.redis.stream_states import Cached, Owned, StreamStates, Unwritten

__all__ = ["Inventory"]

_AT_ONCE = 32  # streams that are stored again at the same time


class Inventory:
    """`store` stores a stream that Redis has lost, or its last events."""

    def __init__(
        self,
        members: Members,
        finished: FinishedStreams,
        streams: StreamStates,
        *,
        store: Callable[[StreamLog], Awaitable[object]],
    ) -> None:
        self.is_due = False  # Redis may have lost something
        self._members = members
        self._finished = finished
        self._streams = streams
        self._store = store
        self._unknown: frozenset[str] = frozenset()  # at the last comparison

    async def take(self) -> None:
        """Compare, if it is due or the numbers differ. Raises: StorageError."""
        owned = self._streams.of(Owned)
        num_known = len(owned) + self._finished.num_to_compact
        if not self.is_due and await self._members.num_streams(self._members.epoch) == num_known:
            return
        self.is_due = False
        listed = frozenset(await self._members.streams(self._members.epoch))
        await self._store_again([one.log for stream_id, one in owned.items() if stream_id not in listed])
        known = Unwritten, Owned
        unlisted = listed - self._finished.to_compact
        unknown = frozenset(one for one in unlisted if not isinstance(self._streams.get(one), known))
        for stream_id in sorted(unknown & self._unknown):  # others may have begun in this moment
            state = self._streams.get(stream_id)
            if isinstance(state, Cached):
                self._finished.compact(state.log)
            else:
                self._streams.doubt(stream_id)
        self._unknown = unknown

    async def _store_again(self, logs: list[StreamLog]) -> None:
        """Store streams that Redis has lost; it would show only with their next events."""
        for start in range(0, len(logs), _AT_ONCE):
            some = [log for log in logs[start : start + _AT_ONCE] if self._streams.owns(log)]
            await asyncio.gather(*map(self._store, some))
