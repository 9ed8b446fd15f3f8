"""Streams that are being opened, and those whose opening got no answer: Redis may have stored such a stream or not."""

from __future__ import annotations

import asyncio
from collections.abc import Container

from tailrace.errors import ClaimTaken
from tailrace.streams.redis._connection import Connection
from tailrace.streams.redis._members import Members
from tailrace.streams.redis._redis_keys import DAY_MS
from tailrace.streams.redis._scripts import DELETE_UNANSWERED

__all__ = ["Openings"]


class Openings:
    """Deletes streams that nobody writes.

    Exception: a client may have repeated its idempotency key at another server and got the stream's id. Then this
    server must continue the stream. `recalled` maps the ids of these streams to the epoch of the server that returned
    the id. `running` are the streams that this server writes.
    """

    def __init__(self, connection: Connection, members: Members, *, running: Container[str]) -> None:
        self.recalled: dict[str, int] = {}
        self._connection = connection
        self._members = members
        self._running = running
        self._begun: set[str] = set()
        self._unanswered: dict[str, None] = {}  # ids, in order
        self._settling = asyncio.Lock()

    @property
    def pending(self) -> set[str]:
        """Return the ids of all these streams."""
        return {*self._begun, *self._unanswered, *self.recalled}

    async def begin(self, stream_id: str) -> None:
        """A stream is opened, perhaps once more. Raises: ClaimTaken if this server continues it already."""
        async with self._settling:
            self._unanswered.pop(stream_id, None)
        if stream_id in self.recalled or stream_id in self._running:
            raise ClaimTaken("This server continues the stream of this Idempotency-Key.")
        self._begun.add(stream_id)

    def end(self, stream_id: str) -> None:
        """The opening has an answer."""
        self._begun.discard(stream_id)

    def fail(self, stream_id: str) -> None:
        """The opening of a stream failed, or was cancelled, or Redis has a stream that this server does not know."""
        self._begun.discard(stream_id)
        self._unanswered[stream_id] = None

    async def settle(self) -> None:
        """Delete each of these streams, or add it to `recalled`. Raises: StorageError."""
        while self._unanswered:
            async with self._settling:
                await self._settle_next()

    async def _settle_next(self) -> None:
        stream_id = next(iter(self._unanswered), None)
        if stream_id is None:
            return
        epoch = self._members.epoch
        keys = self._connection.keys.of_owned(stream_id, epoch)
        about = epoch, stream_id, next(self._members.positions), DAY_MS
        found = await self._connection.run(DELETE_UNANSWERED, keys, *about)
        del self._unanswered[stream_id]
        if found is not None:
            self.recalled[stream_id] = int(found)
