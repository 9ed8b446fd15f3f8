"""Streams whose opening got no reply: Redis may have stored such a stream or not."""

from __future__ import annotations

import asyncio

from tailrace_outer.redis._connection import Connection
from tailrace_outer.redis._members import Members
from tailrace_outer.redis._redis_keys import DAY_MS
from tailrace_outer.redis._scripts import DELETE_UNANSWERED
from tailrace_outer.redis.stream_states import Opening, StreamStates, Unanswered

__all__ = ["Openings"]


class Openings:
    """Deletes streams that nobody writes.

    Exception: a client may have repeated its idempotency key at another server and got the stream's id. Then this
    server must continue the stream: it is recalled.
    """

    def __init__(self, connection: Connection, members: Members, streams: StreamStates) -> None:
        self._connection = connection
        self._members = members
        self._streams = streams
        self._settling = asyncio.Lock()

    async def begin(self, stream_id: str) -> Opening:
        """A stream is opened, perhaps once more. Raises: ClaimTaken if this server continues it already."""
        async with self._settling:
            return self._streams.begin(stream_id)

    async def settle(self) -> None:
        """Delete each unanswered stream, or find that it is recalled. Raises: StorageError."""
        unanswered = self._streams.of(Unanswered)
        while unanswered:
            async with self._settling:
                if stream_id := next(iter(unanswered), ""):
                    await self._settle(stream_id)

    async def _settle(self, stream_id: str) -> None:
        epoch = self._members.epoch
        keys = self._connection.keys.of_owned(stream_id, epoch)
        about = epoch, stream_id, next(self._members.positions), DAY_MS
        found = await self._connection.run(DELETE_UNANSWERED, keys, *about)
        self._streams.settle(stream_id, None if found is None else int(found))
