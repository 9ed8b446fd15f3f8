"""The index of the streams on one machine: their owners, and how long they are kept."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

from tailrace.errors import IdempotencyConflict, JournalDamaged, StreamExpired
from tailrace.streams.damage import missing_stream_error
from tailrace.streams.log import StreamLog
from tailrace.streams.log_store import Lease, StoreState
from tailrace.streams.write_errors import WriteErrors
from tailrace.types import ANONYMOUS, Claim, Record, is_stream_id

__all__ = ["Archive", "Finished", "LocalLogStore", "StreamIndex", "topics_of"]

_MAX_TOMBSTONES = 100_000  # expired ids, which answer 410 and not 404; about 23 MB when full
_Topic = tuple[str, str, str]  # owner, wire, topic
_CACHED_BYTES = 64 * 2**20  # memory for finished streams that are also on disk


class Finished(NamedTuple):
    """A finished stream of an earlier process."""

    stream_id: str
    age_s: float  # since its end
    num_bytes: int
    claim: Claim | None
    owner: str = ANONYMOUS
    topics: tuple[_Topic, ...] = ()


class Archive(Protocol):
    """A store of finished streams outside of memory."""

    def load(self, stream_id: str) -> StreamLog:
        """Raises: JournalDamaged if the stream is lost, StorageError if it cannot be read now."""

    def forget(self, stream_ids: Sequence[str]) -> None:
        """Replace these streams by tombstones."""


class _FinishedEntry(NamedTuple):
    """A finished stream."""

    expires_s: float  # monotonic
    num_bytes: int
    owner: str


class StreamIndex:
    """Streams by id. Finished streams are dropped after `retention_s`. When finished streams take more than
    `budget_bytes` together, the oldest are dropped earlier. Running streams are never dropped.

    With an `archive` that `is_complete`, finished streams can be evicted from memory. They are loaded again when they
    are read.
    """

    def __init__(
        self,
        *,
        retention_s: float = 900.0,
        budget_bytes: int = 256 * 2**20,
        archive: Archive | None = None,
        is_complete: bool = True,
    ) -> None:
        self.retention_s = retention_s
        self._archive = archive
        self._may_evict = archive is not None and is_complete
        self._budget_bytes = budget_bytes
        self._running: dict[str, StreamLog] = {}
        self._cached: OrderedDict[str, StreamLog] = OrderedDict()  # finished streams in memory, by last use
        self._cached_bytes = 0
        self._finished: OrderedDict[str, _FinishedEntry] = OrderedDict()
        self._finished_bytes = 0
        self._expired: OrderedDict[str, str] = OrderedDict()  # id: owner
        self._claims: dict[tuple[str, str], tuple[bytes, str]] = {}  # owner and key: fingerprint, stream id
        self._claim_of: dict[str, tuple[str, str]] = {}
        self._topics: dict[_Topic, dict[str, None]] = {}  # ids of their streams, the oldest first
        self._topics_of: dict[str, tuple[_Topic, ...]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.damaged_until_s = -math.inf  # monotonic; until then a missing stream may have been lost by damage

    def __len__(self) -> int:
        return len(self._running) + len(self._finished)

    def admit(self, log: StreamLog) -> None:
        """Add a running stream."""
        self._running[log.stream_id] = log
        if log.record.claim is not None:
            self._claim(log.record.owner, log.record.claim, log.stream_id)
        self._list(log.stream_id, topics_of(log.record))

    def get(self, stream_id: str, owner: str = ANONYMOUS) -> StreamLog:
        """Raises: UnknownStream if this owner never had such a stream, StreamExpired if it has expired, StorageError if
        it cannot be read now, JournalDamaged if it may have been lost."""
        log = self._running.get(stream_id) or self._cached.get(stream_id)
        if log is not None and log.record.owner == owner:
            if stream_id in self._cached:
                self._cached.move_to_end(stream_id)
            return log
        kept = self._finished.get(stream_id)
        if log is None and kept is not None and kept.owner == owner and self._archive is not None:
            try:
                log = self._archive.load(stream_id)
            except JournalDamaged:
                self._drop([stream_id])
                raise
            self._cache(log)
            return log
        if self._expired.get(stream_id) == owner:
            raise StreamExpired("This stream is no longer kept.")
        raise missing_stream_error(self.damaged_until_s if is_stream_id(stream_id) else -math.inf)

    def finish(self, log: StreamLog) -> None:
        """Start the retention time of a stream that has its terminal event."""
        log.record = log.record.finished()
        self._running.pop(log.stream_id, None)
        expires_s = time.monotonic() + self.retention_s
        self._retain(log.stream_id, _FinishedEntry(expires_s, log.num_bytes, log.record.owner))
        self._cache(log)
        self._schedule()

    def ids_of(self, owner: str) -> list[str]:
        """Return the ids of the owner's streams, running and finished."""
        running = [log.stream_id for log in self._running.values() if log.record.owner == owner]
        return running + [stream_id for stream_id, kept in self._finished.items() if kept.owner == owner]

    def newest(self, owner: str, wire: str, topic: str, *, has_ended: bool = False) -> StreamLog | None:
        """Return the newest stream of a topic: a running one, or any. None if there is none. Raises: as `get`."""
        for stream_id in reversed(self._topics.get((owner, wire, topic), {})):
            if has_ended or stream_id in self._running:
                return self.get(stream_id, owner)
        return None

    def is_finished(self, stream_id: str) -> bool:
        return stream_id in self._finished

    def delete(self, log: StreamLog) -> None:
        """Drop a finished stream before it expires."""
        if log.stream_id in self._finished:
            self._drop([log.stream_id])

    def restore(self, finished: Iterable[Finished], expired: Iterable[tuple[str, str]] = ()) -> None:
        """Add the streams of an earlier process. Its idempotency keys are valid again from then on."""
        now = time.monotonic()
        for kept in sorted(finished, key=lambda kept: -kept.age_s):
            expires_s = now + self.retention_s - kept.age_s
            self._retain(kept.stream_id, _FinishedEntry(expires_s, kept.num_bytes, kept.owner))
            if kept.claim is not None:
                self._claim(kept.owner, kept.claim, kept.stream_id)
            self._list(kept.stream_id, kept.topics)
        self._sweep()
        self._expired |= OrderedDict(expired)

    def recall(self, claim: Claim, owner: str = ANONYMOUS) -> StreamLog | None:
        """Return the stream that an idempotency key started; None if there is none or it has expired.

        Raises: IdempotencyConflict if the key came with another request, StorageError.
        """
        known = self._claims.get((owner, claim.key))
        if known is None:
            return None
        if known[0] != claim.fingerprint:
            raise IdempotencyConflict("This Idempotency-Key was used for another request.", param="idempotency-key")
        return self.get(known[1], owner)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _claim(self, owner: str, claim: Claim, stream_id: str) -> None:
        self._claims[owner, claim.key] = (claim.fingerprint, stream_id)
        self._claim_of[stream_id] = (owner, claim.key)

    def _list(self, stream_id: str, topics: tuple[_Topic, ...]) -> None:
        """List a stream, the newest, in its topics."""
        if topics:
            self._topics_of[stream_id] = topics
        for topic in topics:
            self._topics.setdefault(topic, {})[stream_id] = None

    def _unlist(self, stream_id: str) -> None:
        for topic in self._topics_of.pop(stream_id, ()):
            del self._topics[topic][stream_id]
            if not self._topics[topic]:
                del self._topics[topic]

    def _retain(self, stream_id: str, kept: _FinishedEntry) -> None:
        self._finished[stream_id] = kept
        self._finished_bytes += kept.num_bytes
        while self._finished_bytes > self._budget_bytes and len(self._finished) > 1:
            self._drop([next(iter(self._finished))])

    def _cache(self, log: StreamLog) -> None:
        """Keep a finished stream in memory. Streams that are also on disk are evicted to make room."""
        kept = self._finished[log.stream_id]
        log.expires_s = kept.expires_s
        self._cached[log.stream_id] = log
        self._cached_bytes += kept.num_bytes
        while self._may_evict and self._cached_bytes > _CACHED_BYTES and len(self._cached) > 1:
            self._evict(next(iter(self._cached)))

    def _evict(self, stream_id: str) -> None:
        log = self._cached.pop(stream_id, None)
        if log is not None:
            self._cached_bytes -= self._finished[stream_id].num_bytes
            log.producer = None  # breaks a reference cycle, so that the memory is freed at once

    def _drop(self, stream_ids: list[str]) -> None:
        for stream_id in stream_ids:
            if stream_id in self._cached:
                self._cached[stream_id].expires_s = None
            self._evict(stream_id)
            kept = self._finished.pop(stream_id)
            self._finished_bytes -= kept.num_bytes
            claim = self._claim_of.pop(stream_id, None)
            # Another stream may have got the key.
            if claim is not None and self._claims.get(claim, (b"", ""))[1] == stream_id:
                del self._claims[claim]
            self._unlist(stream_id)
            self._expired[stream_id] = kept.owner
            if len(self._expired) > _MAX_TOMBSTONES:
                self._expired.popitem(last=False)
        if stream_ids and self._archive is not None:
            self._archive.forget(stream_ids)

    def _schedule(self) -> None:
        if self._timer is None and self._finished:
            kept = next(iter(self._finished.values()))
            delay_s = max(0.0, kept.expires_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        now = time.monotonic()
        self._drop([*takewhile(lambda stream_id: self._finished[stream_id].expires_s <= now, self._finished)])
        self._schedule()


def topics_of(record: Record) -> tuple[_Topic, ...]:
    return tuple((record.owner, record.wire, topic) for topic in record.topics)


class LocalLogStore:
    """The part of `LogStore` that all stores on one machine share. No other server can take over their streams."""

    is_durable = True

    def __init__(self, index: StreamIndex, epoch: int, write_errors: WriteErrors) -> None:
        self.index = index
        self.write_errors = write_errors
        self.epoch = epoch
        self._has_taken_over = False
        self._valid_epoch = epoch  # leases of this epoch may write; 0, the epoch of no lease, when closed

    @property
    def num_streams(self) -> int:
        return len(self.index)

    @property
    def state(self) -> StoreState:
        return StoreState(self.epoch, self.num_streams, is_durable=self.is_durable)

    async def read(self, owner: str, stream_id: str, after: int = 0) -> StreamLog:
        log = self.index.get(stream_id, owner)
        log.check_position(after)
        return log

    async def recall(self, owner: str, claim: Claim) -> StreamLog | None:
        return self.index.recall(claim, owner)

    async def newest(self, owner: str, wire: str, topic: str, *, has_ended: bool = False) -> StreamLog | None:
        return self.index.newest(owner, wire, topic, has_ended=has_ended)

    async def drop(self, log: StreamLog) -> None:
        self.index.delete(log)  # from the disk later, as if its retention had ended

    async def streams_of(self, owner: str) -> list[str]:
        return self.index.ids_of(owner)

    async def take_over(self, models: Container[str] | None = None, *, waits: bool = False) -> list[Lease]:
        if waits:
            await asyncio.Event().wait()  # no other server uses this store
        leases = [] if self._has_taken_over else self._unfinished()
        self._has_taken_over = True
        return leases

    def _unfinished(self) -> list[Lease]:
        """Return leases of the streams of an earlier process, and find its finished streams. Called once."""
        return []

    def close(self) -> None:
        """Refuse further events, and stop the expiry of streams. May be called again."""
        self._valid_epoch = 0
        self.index.close()
