"""Finds streams that this server does not write: they have ended, or another server writes them."""

from __future__ import annotations

import asyncio
import contextlib
import time

from tailrace.errors import StorageError, StreamExpired, UnknownStream
from tailrace.streams.log import Reader, StreamLog
from tailrace.streams.rows import Rows
from tailrace_outer.redis._connection import Connection
from tailrace_outer.redis._finished import FinishedStreams
from tailrace_outer.redis._mirrors import Mirrors
from tailrace_outer.redis._patience import CATCH_UP_S
from tailrace_outer.redis._stored import Gone, load
from tailrace_outer.redis.stream_states import StreamStates

__all__ = ["Lookup"]


class Lookup:
    """Looks in the memory of this server first, then in Redis."""

    def __init__(
        self,
        connection: Connection,
        rows: Rows,
        finished: FinishedStreams,
        mirrors: Mirrors,
        streams: StreamStates,
    ) -> None:
        self._connection = connection
        self._keys = connection.keys
        self._rows = rows
        self._finished = finished
        self._mirrors = mirrors
        self._streams = streams

    async def find(self, owner: str, stream_id: str) -> StreamLog:
        """Return the log of a stream. It grows if another server writes the stream.

        Raises: UnknownStream, StreamExpired, StorageError, JournalDamaged.
        """
        mirror = await self._mirrors.find(stream_id)
        if mirror is not None:
            mirror.unread_since_s = time.monotonic()
            return mirror.log
        finished = await self._finished.find(stream_id)
        if finished is not None:
            return finished
        stored = await load(self._connection, stream_id)
        if stored is None or stored.owner != owner:
            raise UnknownStream("There is no such stream.")
        if isinstance(stored, Gone):
            raise StreamExpired("This stream is no longer kept.")
        ttl_ms = 0
        if stored.has_ended:
            ttl_ms = await self._connection.ask(self._connection.client.pttl(self._keys.stream(stream_id)))
        if (known := self._streams.log(stream_id)) is not None:  # another task found it meanwhile
            return known
        log = stored.log(self._rows, stream_id)
        if stored.has_ended:
            log.record = log.record.finished()
            self._finished.cache(log, max(0, ttl_ms) / 1000)
        else:
            await self._mirrors.follow(log, stored.epoch)
        return log

    async def catch_up(self, log: StreamLog, after: int) -> None:
        """Wait for events that another server has shown already, and of which this one has not heard yet. Raises:
        StorageError, also if it does not hear of them in time."""
        if not self._streams.owns(log):
            await self._mirrors.catch_up(log)
            return
        known = min(after, log.last_seq + len(log.queued))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_S):
                while log.last_seq < known and log.released is None:
                    await Reader(log, log.last_seq).wait()
        if log.last_seq < after:
            last = await self._connection.ask(self._connection.client.hget(self._keys.stream(log.stream_id), "last"))
            if last is not None and int(last) >= after:
                raise StorageError("This server does not have the last events of the stream yet.")

    async def streams_of(self, owner: str) -> list[str]:
        """Raises: StorageError."""
        ask, client = self._connection.ask, self._connection.client
        keys = [key async for key in self._connection.scan(self._keys.all_streams)]
        return [self._keys.id_of(key) for key in keys if await ask(client.hget(key, "owner")) == owner.encode()]
