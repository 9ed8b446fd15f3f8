"""All streams that can still be read, and what becomes of them after their end."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict

from tailrace.errors import IdempotencyConflict, StreamExpired, UnknownStream
from tailrace.streams.log import StreamLog

__all__ = ["StreamStore"]

_MAX_TOMBSTONES = 100_000  # of expired ids, so that they answer 410 and not 404; about 10 MB when full


class StreamStore:
    """Streams by id. A finished one stays for `retention_s`, or until the finished ones together take more than
    `budget_bytes`, oldest first. Running streams are never dropped."""

    def __init__(self, *, retention_s: float = 900.0, budget_bytes: int = 256 * 2**20) -> None:
        self.retention_s = retention_s
        self._budget_bytes = budget_bytes
        self._streams: dict[str, StreamLog] = {}
        self._finished: OrderedDict[str, tuple[float, int]] = OrderedDict()  # id: monotonic end of life, bytes
        self._finished_bytes = 0
        self._expired: OrderedDict[str, None] = OrderedDict()
        self._keys: dict[str, tuple[bytes, str]] = {}  # idempotency key: fingerprint of the request, stream id
        self._key_of: dict[str, str] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._streams)

    def create(self, memo: bytes = b"") -> StreamLog:
        """A new, empty stream. Its id is 128 random bits and works as the right to read it."""
        log = StreamLog(secrets.token_urlsafe(16), created_s=time.time(), memo=memo)
        self._streams[log.stream_id] = log
        return log

    def get(self, stream_id: str) -> StreamLog:
        """Raises: StreamExpired if it was there once, UnknownStream if it never was."""
        log = self._streams.get(stream_id)
        if log is not None:
            return log
        if stream_id in self._expired:
            raise StreamExpired("This stream is no longer kept.")
        raise UnknownStream("There is no such stream.")

    def finish(self, log: StreamLog) -> None:
        """Start the retention of a stream that has its terminal event."""
        num_bytes = log.num_bytes
        self._finished[log.stream_id] = (time.monotonic() + self.retention_s, num_bytes)
        self._finished_bytes += num_bytes
        while self._finished_bytes > self._budget_bytes and len(self._finished) > 1:
            self._drop(next(iter(self._finished)))
        self._schedule()

    def delete(self, log: StreamLog) -> None:
        """Forget a finished stream before its time."""
        if log.stream_id in self._finished:
            self._drop(log.stream_id)

    def expires_s(self, log: StreamLog) -> float | None:
        """Seconds until a finished stream is dropped at the latest; None while it runs."""
        finished = self._finished.get(log.stream_id)
        return None if finished is None else max(0.0, finished[0] - time.monotonic())

    def recall(self, key: str, fingerprint: bytes) -> StreamLog | None:
        """The stream that an idempotency key created, as long as it is kept.

        Raises: IdempotencyConflict if the key came with another request.
        """
        known = self._keys.get(key)
        if known is None:
            return None
        if known[0] != fingerprint:
            raise IdempotencyConflict("This Idempotency-Key was used for another request.", param="idempotency-key")
        return self._streams[known[1]]

    def remember(self, key: str, fingerprint: bytes, log: StreamLog) -> None:
        """Tie an idempotency key to a stream, for as long as the stream is kept."""
        self._keys[key] = (fingerprint, log.stream_id)
        self._key_of[log.stream_id] = key

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop(self, stream_id: str) -> None:
        _, num_bytes = self._finished.pop(stream_id)
        self._finished_bytes -= num_bytes
        # Without the circle its memory is free at once, and not when the collector comes.
        self._streams.pop(stream_id).producer = None
        key = self._key_of.pop(stream_id, None)
        if key is not None:
            del self._keys[key]
        self._expired[stream_id] = None
        if len(self._expired) > _MAX_TOMBSTONES:
            self._expired.popitem(last=False)

    def _schedule(self) -> None:
        if self._timer is None and self._finished:
            expires, _ = next(iter(self._finished.values()))
            delay_s = max(0.0, expires - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        now = time.monotonic()
        while self._finished and next(iter(self._finished.values()))[0] <= now:
            self._drop(next(iter(self._finished)))
        self._schedule()
