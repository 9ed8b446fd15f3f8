"""All streams that can still be read, and what becomes of them after their end."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from collections import OrderedDict
from itertools import islice, takewhile

from tailrace.errors import Draining, IdempotencyConflict, JournalDamaged, StreamExpired, UnknownStream
from tailrace.streams.journal import Journal, MemoryJournal
from tailrace.streams.log import StreamLog
from tailrace.streams.record import Claim, Record
from tailrace.types import Event

__all__ = ["StreamStore", "is_stream_id", "new_stream_id"]

_STREAM_ID = re.compile(r"[A-Za-z0-9_-]{22}", re.ASCII)
_MAX_TOMBSTONES = 100_000  # of expired ids, so that they answer 410 and not 404; about 10 MB when full
_AT_HAND_BYTES = 64 * 2**20  # of finished streams that a journal keeps as well


def new_stream_id() -> str:
    """128 random bits, which work as the right to read the stream."""
    return secrets.token_urlsafe(16)


def is_stream_id(text: str) -> bool:
    """Whether it looks like one of ours, whether there is such a stream or not."""
    return _STREAM_ID.fullmatch(text) is not None


class StreamStore:
    """Streams by id. A finished one stays for `retention_s`, or until the finished ones together take more than
    `budget_bytes`, oldest first. Running streams are never dropped.

    What a journal keeps is there again in the next process, and need not all be in memory: `StreamLog` is then made
    anew from the journal when somebody asks for it.
    """

    def __init__(
        self, *, retention_s: float = 900.0, budget_bytes: int = 256 * 2**20, journal: Journal | None = None
    ) -> None:
        self.retention_s = retention_s
        self.journal = journal if journal is not None else MemoryJournal()
        self._budget_bytes = budget_bytes
        self._running: dict[str, StreamLog] = {}
        self._at_hand: OrderedDict[str, StreamLog] = OrderedDict()  # finished ones in memory, by last use
        self._at_hand_bytes = 0
        self._finished: OrderedDict[str, tuple[float, int]] = OrderedDict()  # id: monotonic end of life, bytes
        self._finished_bytes = 0
        self._expired: OrderedDict[str, None] = OrderedDict()
        self._claims: dict[str, tuple[bytes, str]] = {}  # idempotency key: fingerprint of the request, stream id
        self._key_of: dict[str, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        damage_age_s = self.journal.damage_age_s()
        self._damaged_until_s = -math.inf if damage_age_s is None else time.monotonic() + retention_s - damage_age_s

    def __len__(self) -> int:
        return len(self._running) + len(self._finished)

    def create(self, record: Record) -> StreamLog:
        """A new, empty stream. Raises: StorageError if it cannot be kept."""
        log = self.journal.begin(record)
        self._admit(log)
        return log

    def append(self, log: StreamLog, event: Event) -> None:
        """Add an event to a stream; readers see it when the journal has it."""
        self.journal.append(log, event)

    def cancel(self, log: StreamLog) -> None:
        """Have a stream end as cancelled; that can be seen at once.

        Raises: Draining if it goes on in the next process, StorageError if its end cannot be kept just now.
        """
        if log.is_parked and log.end is None:
            raise Draining("This stream goes on in the next server.", retry_after_s=5.0)
        log.cancel()
        self.journal.flush()
        if log.end is None and self.journal.trouble is not None:
            raise self.journal.trouble.with_traceback(None)

    def get(self, stream_id: str) -> StreamLog:
        """Raises: StreamExpired if it was there once, UnknownStream if it never was, StorageError if it cannot be
        read just now, JournalDamaged if it may have been lost."""
        log = self._running.get(stream_id) or self._at_hand.get(stream_id)
        if log is not None:
            return log
        if stream_id in self._finished:
            try:
                log = self.journal.load(stream_id)
            except JournalDamaged:
                self._drop([stream_id])
                raise
            if log is not None:
                self._hold(log)
                return log
        if stream_id in self._expired:
            raise StreamExpired("This stream is no longer kept.")
        if is_stream_id(stream_id) and time.monotonic() < self._damaged_until_s:
            raise JournalDamaged("There is no such stream, or it was lost: the journal of this server was damaged.")
        raise UnknownStream("There is no such stream.")

    def finish(self, log: StreamLog) -> None:
        """Start the retention of a stream that has its terminal event."""
        num_bytes = self.journal.finish(log)
        log.record = log.record.finished()
        self._running.pop(log.stream_id, None)
        self._retain(log.stream_id, num_bytes, self.retention_s)
        self._hold(log)
        self._schedule()

    def delete(self, log: StreamLog) -> None:
        """Forget a finished stream before its time. Raises: StorageError if that cannot be kept."""
        if log.stream_id in self._finished:
            self.journal.delete(log.stream_id)
            self._drop([log.stream_id])

    def recover(self) -> list[StreamLog]:
        """Take over what an earlier process left; returns the streams that it could not finish, oldest first.

        Idempotency keys hold again from here on.
        """
        for kept in sorted(self.journal.finished(), key=lambda kept: -kept.age_s):
            self._retain(kept.stream_id, kept.num_bytes, self.retention_s - kept.age_s)
            if kept.claim is not None:
                self._claim(kept.claim, kept.stream_id)
        self._sweep()
        left = self.journal.unfinished()
        self._expired |= OrderedDict.fromkeys(self.journal.expired())
        unfinished = []
        for log in left:
            self._admit(log)
            if log.end is not None:  # the earlier process only had not come to put it away
                self.finish(log)
            else:
                unfinished.append(log)
        return unfinished

    def expires_s(self, log: StreamLog) -> float | None:
        """Seconds until a finished stream is dropped at the latest; None while it runs."""
        finished = self._finished.get(log.stream_id)
        return None if finished is None else max(0.0, finished[0] - time.monotonic())

    def recall(self, claim: Claim) -> StreamLog | None:
        """The stream that an idempotency key created, as long as it is kept.

        Raises: IdempotencyConflict if the key came with another request, StorageError.
        """
        known = self._claims.get(claim.key)
        if known is None:
            return None
        if known[0] != claim.fingerprint:
            raise IdempotencyConflict("This Idempotency-Key was used for another request.", param="idempotency-key")
        return self.get(known[1])

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _admit(self, log: StreamLog) -> None:
        self._running[log.stream_id] = log
        if log.record.claim is not None:
            self._claim(log.record.claim, log.stream_id)

    def _claim(self, claim: Claim, stream_id: str) -> None:
        self._claims[claim.key] = (claim.fingerprint, stream_id)
        self._key_of[stream_id] = claim.key

    def _retain(self, stream_id: str, num_bytes: int, for_s: float) -> None:
        self._finished[stream_id] = (time.monotonic() + for_s, num_bytes)
        self._finished_bytes += num_bytes
        num_dropped, over_bytes = 0, self._finished_bytes - self._budget_bytes
        for _, kept_bytes in self._finished.values():
            if over_bytes <= 0 or num_dropped == len(self._finished) - 1:
                break
            over_bytes -= kept_bytes
            num_dropped += 1
        self._drop(list(islice(self._finished, num_dropped)))

    def _hold(self, log: StreamLog) -> None:
        """Have a finished stream at hand, and let others go for it that the journal keeps as well."""
        self._at_hand[log.stream_id] = log
        self._at_hand_bytes += self._finished[log.stream_id][1]
        while self.journal.keeps and self._at_hand_bytes > _AT_HAND_BYTES and len(self._at_hand) > 1:
            self._let_go(next(iter(self._at_hand)))

    def _let_go(self, stream_id: str) -> None:
        log = self._at_hand.pop(stream_id, None)
        if log is not None:
            self._at_hand_bytes -= self._finished[stream_id][1]
            log.producer = None  # without the circle its memory is free at once, and not when the collector comes

    def _drop(self, stream_ids: list[str]) -> None:
        for stream_id in stream_ids:
            self._let_go(stream_id)
            self._finished_bytes -= self._finished.pop(stream_id)[1]
            key = self._key_of.pop(stream_id, None)
            if key is not None and self._claims.get(key, (b"", ""))[1] == stream_id:  # it may have got another since
                del self._claims[key]
            self._expired[stream_id] = None
            if len(self._expired) > _MAX_TOMBSTONES:
                self._expired.popitem(last=False)
        if stream_ids:
            self.journal.forget(stream_ids)

    def _schedule(self) -> None:
        if self._timer is None and self._finished:
            expires, _ = next(iter(self._finished.values()))
            delay_s = max(0.0, expires - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        now = time.monotonic()
        self._drop([*takewhile(lambda stream_id: self._finished[stream_id][0] <= now, self._finished)])
        self._schedule()
