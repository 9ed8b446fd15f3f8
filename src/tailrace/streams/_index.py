"""The streams of one machine: which can still be read, whose they are, and for how long."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

from tailrace.durable.damage import not_there
from tailrace.errors import Draining, IdempotencyConflict, JournalDamaged, SeqOutOfRange, StreamExpired
from tailrace.streams.log import Claim, StreamLog, is_stream_id
from tailrace.streams.log_store import Lease
from tailrace.types import ANONYMOUS

__all__ = ["Archive", "Finished", "LocalLogStore", "StreamIndex"]

_MAX_TOMBSTONES = 100_000  # of expired ids, so that they answer 410 and not 404; about 10 MB when full
_CACHED_BYTES = 64 * 2**20  # of finished streams that are on disk as well


class Finished(NamedTuple):
    """A finished stream that an earlier process left."""

    stream_id: str
    age_s: float  # since its end
    num_bytes: int
    claim: Claim | None
    owner: str = ANONYMOUS


class Archive(Protocol):
    """Where finished streams are kept, so that they need not be in memory."""

    def load(self, stream_id: str) -> StreamLog:
        """Raises: JournalDamaged if it is lost, StorageError if it cannot be read now."""

    def forget(self, stream_ids: Sequence[str]) -> None:
        """Keep of these streams only that they were there once."""


class _Kept(NamedTuple):
    """A finished stream."""

    expires_s: float  # monotonic
    num_bytes: int
    owner: str


class StreamIndex:
    """Streams by id. A finished one stays for `retention_s`, or until the finished ones together take more than
    `budget_bytes`, oldest first. Running streams are never dropped.

    With an `archive` that `is_complete`, not all finished streams stay in memory: they are loaded when they are asked
    for.
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
        self._cached: OrderedDict[str, StreamLog] = OrderedDict()  # finished ones in memory, by last use
        self._cached_bytes = 0
        self._finished: OrderedDict[str, _Kept] = OrderedDict()
        self._finished_bytes = 0
        self._expired: OrderedDict[str, str] = OrderedDict()  # id: owner
        self._claims: dict[tuple[str, str], tuple[bytes, str]] = {}  # owner and key: fingerprint, stream id
        self._claim_of: dict[str, tuple[str, str]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.damaged_until_s = -math.inf  # until then, on the monotonic clock, streams may be missing by damage

    def __len__(self) -> int:
        return len(self._running) + len(self._finished)

    def admit(self, log: StreamLog) -> None:
        """A stream has begun."""
        self._running[log.stream_id] = log
        if log.record.claim is not None:
            self._claim(log.record.owner, log.record.claim, log.stream_id)

    def get(self, stream_id: str, owner: str = ANONYMOUS) -> StreamLog:
        """Raises: UnknownStream if this owner never had such a stream, StreamExpired if it is no longer kept,
        StorageError if it cannot be read just now, JournalDamaged if it may have been lost."""
        log = self._running.get(stream_id) or self._cached.get(stream_id)
        if log is not None and log.record.owner == owner:
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
        raise not_there(self.damaged_until_s if is_stream_id(stream_id) else -math.inf)

    def finish(self, log: StreamLog) -> None:
        """Start the retention of a stream that has its terminal event."""
        log.record = log.record.finished()
        self._running.pop(log.stream_id, None)
        self._retain(log.stream_id, _Kept(time.monotonic() + self.retention_s, log.num_bytes, log.record.owner))
        self._cache(log)
        self._schedule()

    def ids_of(self, owner: str) -> list[str]:
        """Of the running and the finished ones."""
        running = [log.stream_id for log in self._running.values() if log.record.owner == owner]
        return running + [stream_id for stream_id, kept in self._finished.items() if kept.owner == owner]

    def is_finished(self, stream_id: str) -> bool:
        return stream_id in self._finished

    def delete(self, log: StreamLog) -> None:
        """Forget a finished stream before its time."""
        if log.stream_id in self._finished:
            self._drop([log.stream_id])

    def restore(self, finished: Iterable[Finished], expired: Iterable[tuple[str, str]] = ()) -> None:
        """Take in what an earlier process left. Its idempotency keys hold again from here on."""
        now = time.monotonic()
        for kept in sorted(finished, key=lambda kept: -kept.age_s):
            expires_s = now + self.retention_s - kept.age_s
            self._retain(kept.stream_id, _Kept(expires_s, kept.num_bytes, kept.owner))
            if kept.claim is not None:
                self._claim(kept.owner, kept.claim, kept.stream_id)
        self._sweep()
        self._expired |= OrderedDict(expired)

    def recall(self, claim: Claim, owner: str = ANONYMOUS) -> StreamLog | None:
        """The stream that an idempotency key began, as long as it is kept.

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

    def _retain(self, stream_id: str, kept: _Kept) -> None:
        self._finished[stream_id] = kept
        self._finished_bytes += kept.num_bytes
        while self._finished_bytes > self._budget_bytes and len(self._finished) > 1:
            self._drop([next(iter(self._finished))])

    def _cache(self, log: StreamLog) -> None:
        """Hold a finished stream in memory, and let others go for it that are on disk as well."""
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
            log.producer = None  # without the circle its memory is free at once, and not when the collector comes

    def _drop(self, stream_ids: list[str]) -> None:
        for stream_id in stream_ids:
            if stream_id in self._cached:
                self._cached[stream_id].expires_s = None
            self._evict(stream_id)
            kept = self._finished.pop(stream_id)
            self._finished_bytes -= kept.num_bytes
            claim = self._claim_of.pop(stream_id, None)
            if claim is not None and self._claims.get(claim, (b"", ""))[1] == stream_id:  # it may have got another
                del self._claims[claim]
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


class LocalLogStore:
    """The part of the `LogStore` promise that needs no more than an index: no other server can take a stream away."""

    def __init__(self, index: StreamIndex, epoch: int) -> None:
        self.index = index
        self.epoch = epoch
        self._valid_epoch = epoch  # of the leases that may write; 0, which is of none, when this is closed

    @property
    def num_streams(self) -> int:
        return len(self.index)

    def end(self, lease: Lease) -> None:
        self.index.finish(lease.log)

    async def read(self, owner: str, stream_id: str, after: int = 0) -> StreamLog:
        log = self.index.get(stream_id, owner)
        if after > log.last_seq:
            raise SeqOutOfRange("This stream has not come that far.", param="last-event-id")
        return log

    async def recall(self, owner: str, claim: Claim) -> StreamLog | None:
        return self.index.recall(claim, owner)

    def streams_of(self, owner: str) -> list[str]:
        return self.index.ids_of(owner)

    def _stop(self, log: StreamLog) -> None:
        """Raises: Draining if it goes on in the next process."""
        if log.is_parked and log.end is None:
            raise Draining("This stream goes on in the next server.", retry_after_s=5.0)
        log.cancel()

    def close(self) -> None:
        """Take no more events, and let no stream expire. Harmless when repeated."""
        self._valid_epoch = 0
        self.index.close()
