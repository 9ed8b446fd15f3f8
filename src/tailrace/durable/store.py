"""Durable streams: named logs that clients make, append to, fork, close and delete.

A change is decided by `create`, `append` and `delete`, becomes a record, goes to the journal, and only then is applied,
by `apply` alone. So what was kept gives the same state again.

All that streams take counts towards one budget: their bytes, and a fixed charge for every stream, append, message and
producer, which bounds the number of each. Streams whose time has passed go when somebody asks for them, or for room.

After a restart every sliding time begins anew: when a stream was last read is not worth a record.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Literal

from tailrace.durable.asked import Creation, ProducerBatch, Receipt, fork_of, is_as_asked, is_repeated, kind_of
from tailrace.durable.damage import not_there
from tailrace.durable.messages import read_pieces
from tailrace.durable.records import Appended, Created, Dropped, DurableRecord, Hidden, Stamp
from tailrace.durable.stream import DurableStream, is_json
from tailrace.errors import (
    JournalDamaged,
    RequestError,
    StreamClosed,
    StreamConflict,
    StreamExpired,
    StreamsFull,
    UnknownStream,
)

__all__ = ["DurableStore"]

# In memory, besides the bytes themselves (CPython 3.11).
_STREAM_BYTES = 1200
_CHUNK_BYTES = 150
_PIECE_BYTES = 50
_PRODUCER_BYTES = 300
_SHARED_BYTES = 8  # an append that a fork has from its source
_SWEEP_S = 1.0  # streams are looked through for room no more often than this


class DurableStore:
    """Streams by key. Used from one event loop only."""

    def __init__(
        self, *, budget_bytes: int, journal: Callable[[bytes, DurableRecord], None] = lambda key, record: None
    ) -> None:
        self.journal = journal
        self.damaged_until_s = -math.inf  # until then, on the monotonic clock, streams may be missing by damage
        self.num_bytes = 0
        self._budget_bytes = budget_bytes
        self.streams: dict[bytes, DurableStream] = {}
        self._swept_s = -_SWEEP_S
        self._is_closing = False

    def __len__(self) -> int:
        return len(self.streams)

    def restore(self, records: Iterable[tuple[bytes, DurableRecord]]) -> None:
        """Replay what a journal has kept, in its order. Nothing is journaled again."""
        for key, record in records:
            self.apply(key, record)

    def close(self) -> None:
        """Send everybody away who waits, now and from now on."""
        self._is_closing = True
        for stream in self.streams.values():
            stream.halt()

    # Decisions

    def find(self, key: bytes) -> DurableStream:
        """Raises: UnknownStream, StreamExpired for one that is kept for its forks only, or JournalDamaged for one that
        may have been lost."""
        stream = self.streams.get(key)
        if stream is not None and stream.is_over:
            self._remove(stream)
            stream = self.streams.get(key)
        if stream is None:
            raise not_there(self.damaged_until_s)
        if stream.is_gone:
            raise StreamExpired("This stream was deleted; only its forks are left.")
        return stream

    def create(self, key: bytes, asked: Creation, body: bytes) -> tuple[DurableStream, bool]:
        """The stream, and whether it is new. Raises: StreamConflict, SeqOutOfRange, StreamsFull and RequestError;
        UnknownStream and JournalDamaged for the source of a fork."""
        present = self._present(key)
        if present is None:
            created = self._planned(asked, body)
            position = created.fork.position if created.fork is not None else 0
            self._need(_STREAM_BYTES + len(key) + position * _SHARED_BYTES + _cost(created.pieces))
            self._commit(key, created)
            return self.streams[key], True
        if not is_as_asked(present, asked):
            raise StreamConflict("There is a stream at this path already, with other settings.")
        present.touch()
        return present, False

    def append(self, key: bytes, batch: ProducerBatch) -> Receipt:
        """Append, close, or both. Raises: what `find` does, StreamConflict and its kinds, StaleEpoch,
        StreamsFull, RequestError."""
        stream = self.find(key)
        if not batch.body and not batch.closes:
            raise RequestError("An append has a body.")
        if batch.body and batch.content_type is None:
            raise RequestError("Say what the body is with Content-Type.", param="content-type")
        if stream.is_closed:
            if batch.body and (batch.stamp is None or batch.stamp != stream.closed_by):
                raise StreamClosed(stream.end)
            return self._receipt(stream, "repeated", batch.stamp)
        if batch.body and kind_of(batch.content_type) != kind_of(stream.content_type):
            raise StreamConflict("The stream has another content type.", param="content-type")
        pieces = read_pieces(batch.body, json=is_json(stream.content_type))
        if batch.body and not pieces:
            raise RequestError("An empty list appends nothing.")
        if batch.stamp is not None and is_repeated(stream, batch.stamp):
            return self._receipt(stream, "repeated", batch.stamp)
        if batch.seq is not None and stream.last_seq is not None and batch.seq <= stream.last_seq:
            raise StreamConflict("Stream-Seq is not behind the last one.", param="stream-seq")
        is_new = batch.stamp is not None and batch.stamp.producer not in stream.producers
        self._need(_cost(pieces) + _PRODUCER_BYTES * is_new)
        self._commit(key, Appended(pieces, batch.stamp, batch.seq, batch.closes))
        return self._receipt(stream, "appended" if pieces else "closed", batch.stamp)

    def delete(self, key: bytes) -> None:
        """Raises: what `find` does."""
        self._remove(self.find(key))

    def delete_below(self, prefix: bytes) -> int:
        """Delete all streams whose keys begin so; returns how many there were."""
        found = [stream for key, stream in self.streams.items() if key.startswith(prefix)]
        for stream in found:
            if stream.key in self.streams and not stream.is_gone:
                self._remove(stream)
        return len(found)

    def _present(self, key: bytes) -> DurableStream | None:
        try:
            return self.find(key)
        except (UnknownStream, JournalDamaged):  # whatever was lost, a stream can be made there
            return None
        except StreamExpired:
            raise StreamConflict("This path is taken by a deleted stream that has forks.") from None

    def _planned(self, asked: Creation, body: bytes) -> Created:
        content_type, ttl_s, expires_s, fork = asked.content_type, asked.ttl_s, asked.expires_s, None
        if asked.source is not None:
            source = self._source(asked.source)
            if content_type is not None and kind_of(content_type) != kind_of(source.content_type):
                raise StreamConflict("The source has another content type.", param="content-type")
            content_type = content_type or source.content_type
            if ttl_s is None and expires_s is None:
                ttl_s, expires_s = source.created.ttl_s, source.created.expires_s
            fork = fork_of(source, asked)
        content_type = content_type or "application/octet-stream"
        pieces = read_pieces(body, json=is_json(content_type))
        return Created(content_type, secrets.token_hex(6), pieces, ttl_s, expires_s, asked.closes, fork)

    def _source(self, key: bytes) -> DurableStream:
        try:
            return self.find(key)
        except StreamExpired:
            raise StreamConflict("The source of this fork was deleted.", param="stream-forked-from") from None

    def _receipt(
        self, stream: DurableStream, outcome: Literal["appended", "closed", "repeated"], stamp: Stamp | None
    ) -> Receipt:
        stream.touch()
        known = stream.producers.get(stamp.producer) if stamp is not None else None
        last = Stamp(stamp.producer, *known) if stamp is not None and known is not None else None
        return Receipt(outcome, stream.end, stream.is_closed, last)

    def _remove(self, stream: DurableStream) -> None:
        """Hide a stream that has forks; drop any other, and the hidden ones that were kept for it alone."""
        if stream.num_forks:
            self._commit(stream.key, Hidden())
            return
        self._commit(stream.key, Dropped())
        fork = stream.created.fork
        source = self.streams.get(fork.source) if fork is not None else None
        if source is not None and source.is_gone and not source.num_forks:
            self._remove(source)

    def _need(self, num_bytes: int) -> None:
        """Make sure of room. Raises: StreamsFull."""
        if self.num_bytes + num_bytes <= self._budget_bytes:
            return
        if time.monotonic() >= self._swept_s + _SWEEP_S:
            self._swept_s = time.monotonic()
            for stream in [stream for stream in self.streams.values() if stream.is_over]:
                self._remove(stream)
        if self.num_bytes + num_bytes > self._budget_bytes:
            raise StreamsFull("There is no room for more; delete streams, or start with a larger --durable-bytes.")

    # Changes

    def _commit(self, key: bytes, record: DurableRecord) -> None:
        self.journal(key, record)
        self.apply(key, record)

    def apply(self, key: bytes, record: DurableRecord) -> None:
        """Make the change that a record says."""
        if isinstance(record, Created):
            self._begin(key, record)
            return
        stream = self.streams[key]
        match record:
            case Appended(pieces, stamp, seq, closes):
                num_bytes = _cost(pieces)
                stream.extend(pieces)
                if stamp is not None:
                    num_bytes += _PRODUCER_BYTES * (stamp.producer not in stream.producers)
                    stream.producers[stamp.producer] = (stamp.epoch, stamp.seq)
                if seq is not None:
                    stream.last_seq = seq
                if closes:
                    stream.is_closed, stream.closed_by = True, stamp
                self._charge(stream, num_bytes)
            case Hidden():
                stream.is_gone = stream.is_halted = True
            case Dropped():
                stream.is_gone = stream.is_halted = True
                self.num_bytes -= stream.num_bytes
                del self.streams[key]
                if stream.created.fork is not None:
                    self.streams[stream.created.fork.source].num_forks -= 1
        stream.wake()

    def _begin(self, key: bytes, created: Created) -> None:
        stream = DurableStream(key, created)
        stream.is_halted = self._is_closing
        num_bytes = _STREAM_BYTES + len(key) + _cost(created.pieces)
        if created.fork is not None:
            source = self.streams[created.fork.source]
            source.num_forks += 1
            stream.chunks = source.chunks[: created.fork.position]
            num_bytes += len(stream.chunks) * _SHARED_BYTES
            if created.fork.part:
                part = source.chunks[created.fork.position].cut(created.fork.part, json=is_json(created.content_type))
                num_bytes += _cost(part)
                stream.extend(part)
        stream.extend(created.pieces)
        self.streams[key] = stream
        self._charge(stream, num_bytes)

    def _charge(self, stream: DurableStream, num_bytes: int) -> None:
        stream.num_bytes += num_bytes
        self.num_bytes += num_bytes


def _cost(pieces: tuple[bytes, ...]) -> int:
    return sum(map(len, pieces)) + len(pieces) * _PIECE_BYTES + _CHUNK_BYTES * bool(pieces)
