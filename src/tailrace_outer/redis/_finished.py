"""Streams that have ended: a cache of them, and what is tidied up in Redis."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import OrderedDict, deque

from tailrace.errors import StorageError
from tailrace.streams.log import StreamLog
from tailrace.streams.rows import Rows
from tailrace.types import Record
from tailrace_outer.redis._claims import Claims
from tailrace_outer.redis._connection import Connection
from tailrace_outer.redis._members import Members
from tailrace_outer.redis._patience import COMPACT_AFTER_S, TIDY_S
from tailrace_outer.redis._redis_keys import DAY_MS
from tailrace_outer.redis._scripts import COMPACT, DELETE
from tailrace_outer.redis._topics import Topics
from tailrace_outer.redis.stream_states import Cached, StreamStates

__all__ = ["FinishedStreams", "lifetimes_ms"]

_CACHED_BYTES = 64 * 2**20
_AT_ONCE = 16  # streams that are compacted at the same time


def lifetimes_ms(retention_s: float) -> tuple[int, int]:
    """Return for how long Redis keeps an ended stream, and for how long it is known that there was one."""
    retention_ms = max(1, int(1000 * retention_s))
    return retention_ms, retention_ms + DAY_MS


class FinishedStreams:
    """Compacts the streams that ended on this server, and drops the oldest of them beyond `budget_bytes`. With `keeps`
    false they are deleted from Redis, and are only in the memory of this server."""

    def __init__(
        self,
        connection: Connection,
        members: Members,
        claims: Claims,
        topics: Topics,
        rows: Rows,
        streams: StreamStates,
        *,
        retention_s: float,
        budget_bytes: int,
        keeps: bool,
    ) -> None:
        self._connection = connection
        self._keys = connection.keys
        self._rows = rows
        self._streams = streams
        self._members = members
        self._claims = claims
        self._topics = topics
        self._retention_s = retention_s
        self._budget_bytes = budget_bytes
        self._keeps = keeps
        self._to_compact: deque[tuple[float, int, StreamLog]] = deque()  # end (monotonic), epoch
        self._own: OrderedDict[str, tuple[float, int]] = OrderedDict()  # ended here: expiry (monotonic), bytes
        self._own_bytes = 0

    def __len__(self) -> int:
        return len(self._own)

    @property
    def num_to_compact(self) -> int:
        return len(self._to_compact)

    @property
    def to_compact(self) -> set[str]:
        """Return the ids of the streams that Redis still lists as this server's."""
        return {log.stream_id for _, _, log in self._to_compact}

    def compact(self, log: StreamLog) -> None:
        """Compact a stream soon."""
        self._to_compact.append((time.monotonic(), self._members.epoch, log))

    # The cache

    def add(self, log: StreamLog) -> None:
        """A stream of this server has its terminal event."""
        log.record = log.record.finished()
        self.compact(log)
        self.cache(log)
        self._own[log.stream_id] = (time.monotonic() + self._retention_s, log.num_bytes)
        self._own_bytes += log.num_bytes

    def cache(self, log: StreamLog, expires_in_s: float | None = None) -> None:
        log.expires_s = time.monotonic() + (self._retention_s if expires_in_s is None else expires_in_s)
        self._streams.cache(log)
        cached = self._streams.of(Cached)
        while self._streams.cached_bytes > _CACHED_BYTES and len(cached) > 1:
            self._streams.leave(*next(iter(cached.items())))

    async def find(self, stream_id: str) -> StreamLog | None:
        """Return a stream of the cache if it can still be read: another server may have deleted it.

        Raises: StorageError.
        """
        state = self._streams.get(stream_id)
        if not isinstance(state, Cached):
            return None
        log = state.log
        is_kept = log.expires_s is not None and log.expires_s > time.monotonic()
        if is_kept and self._keeps:
            is_kept = bool(await self._connection.ask(self._connection.client.exists(self._keys.stream(stream_id))))
        if not is_kept:
            self._streams.leave(stream_id, state)
            return None
        if self._streams.get(stream_id) is state:  # it may have left meanwhile
            self._streams.move(stream_id, state)  # it is the last one to leave now
        return log

    # Redis

    async def delete(self, stream_id: str) -> bool:
        """Return whether it is deleted: if Redis has lost its end, another server may write it. Raises:
        StorageError."""
        epoch = self._members.epoch
        keys, tombstone_ms = self._keys.of_owned(stream_id, epoch), lifetimes_ms(self._retention_s)[1]
        is_deleted = await self._connection.run(DELETE, keys, epoch, stream_id, tombstone_ms)
        state = self._streams.get(stream_id)
        if isinstance(state, Cached):
            state.log.expires_s = None
            self._streams.leave(stream_id, state)
        self._forget(stream_id)
        return bool(is_deleted)

    def _forget(self, stream_id: str) -> None:
        _, num_bytes = self._own.pop(stream_id, (0.0, 0))
        self._own_bytes -= num_bytes

    async def run(self) -> None:
        """Tidy up until cancelled."""
        while True:
            await asyncio.sleep(TIDY_S)
            with contextlib.suppress(StorageError):
                await self.tidy_up(ended_before_s=time.monotonic() - COMPACT_AFTER_S)

    async def tidy_up(self, *, ended_before_s: float | None = None) -> None:
        """Compact the streams that ended before that time (monotonic), or all. Raises: StorageError."""
        while self._to_compact and (ended_before_s is None or self._to_compact[0][0] <= ended_before_s):
            some = list(itertools.islice(self._to_compact, _AT_ONCE))
            await asyncio.gather(*(self._compact(epoch, log) for _, epoch, log in some))
            for _ in some:
                self._to_compact.popleft()
        while self._own_bytes > self._budget_bytes and len(self._own) > 1:
            await self.delete(next(iter(self._own)))
        while self._own and next(iter(self._own.values()))[0] <= time.monotonic():
            self._forget(next(iter(self._own)))

    async def _compact(self, epoch: int, log: StreamLog) -> None:
        """Move the events of a stream into one field. Raises: StorageError."""
        await self.end(log.record)  # first: whoever takes the stream over still finds it in the list
        keys = self._keys.of_owned(log.stream_id, epoch)
        if self._keeps:
            record = self._rows.encode_record(log.record)
            events = self._rows.encode_events(log.stream_id, log.events)
            times = lifetimes_ms(self._retention_s)
            await self._connection.run(COMPACT, keys, epoch, record, events, log.stream_id, log.last_seq, *times)
        else:
            await self._connection.run(DELETE, keys, epoch, log.stream_id, lifetimes_ms(self._retention_s)[1])

    async def end(self, record: Record) -> None:
        """Keep the idempotency key of an ended stream for as long as the stream, and its entry in its topics.
        Raises: StorageError."""
        await self._claims.end(record, self._retention_s)
        await self._topics.end(record, self._retention_s)
