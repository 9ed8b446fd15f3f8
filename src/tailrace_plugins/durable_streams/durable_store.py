"""Durable streams: named logs that clients create, append to, fork, close and delete.

`create`, `append` and `delete` check a request and make a change of it. The change goes to the journal; then `apply`
changes the state. Nothing else changes the state, so replaying the journal restores it. The forms in which a server
uses the streams are in `durable_streams.py`.

All streams share one memory budget. It counts their bytes, and a fixed charge for every stream, append, message and
producer, which limits the number of each. Expired streams are removed when a client requests them, or when room is
needed.

A TTL starts again after a restart, because reads are not kept. Where servers share the streams, a read is kept if
the others need to know of it (`keeps_use`).
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, MutableMapping
from typing import Literal

from tailrace.errors import JournalDamaged, RequestError, StreamExpired, UnknownStream
from tailrace.server import missing_stream_error
from tailrace_plugins.durable_streams.append_body import read_pieces
from tailrace_plugins.durable_streams.durable_changes import (
    Appended,
    Created,
    Dropped,
    DurableChange,
    Hidden,
    Stamp,
    Used,
)
from tailrace_plugins.durable_streams.durable_errors import StreamClosed, StreamConflict, StreamsFull
from tailrace_plugins.durable_streams.durable_stream import DurableStream, is_json
from tailrace_plugins.durable_streams.operations import (
    Creation,
    ProducerBatch,
    Receipt,
    fork_of,
    is_duplicate,
    matches_creation,
    media_type,
)

__all__ = ["DurableStore"]

# In memory, besides the bytes themselves (CPython 3.11).
_STREAM_BYTES = 1200
_CHUNK_BYTES = 150
_PIECE_BYTES = 50
_PRODUCER_BYTES = 300
_SHARED_BYTES = 8  # an append that a fork shares with its source
_SWEEP_S = 1.0  # shortest time between two sweeps for expired streams


class DurableStore:
    """Streams by key. Used from one event loop only."""

    def __init__(
        self,
        *,
        budget_bytes: int,
        journal: Callable[[bytes, DurableChange], None] = lambda key, change: None,
        keeps_use: bool = False,
    ) -> None:
        self.journal = journal
        self.keeps_use = keeps_use
        self.damaged_until_s = -math.inf  # monotonic; until then a missing stream may have been lost by damage
        self.num_bytes = 0
        self.budget_bytes = budget_bytes
        self.streams: MutableMapping[bytes, DurableStream] = {}
        self.swept_s = -_SWEEP_S  # monotonic
        self._is_closing = False

    def __len__(self) -> int:
        return len(self.streams)

    def restore(self, changes: Iterable[tuple[bytes, DurableChange]]) -> None:
        """Replay the changes of a journal in their order, without writing them again."""
        for key, change in changes:
            self.apply(key, change)

    def close(self) -> None:
        """Send away all followers, present and future."""
        self._is_closing = True
        for stream in self.streams.values():
            stream.halt()

    # Decisions

    def find(self, key: bytes) -> DurableStream:
        """Raises: UnknownStream, StreamExpired if the stream is kept only for its forks, JournalDamaged if it may have
        been lost."""
        stream = self.streams.get(key)
        if stream is not None and stream.is_expired:
            self._remove(stream)
            stream = self.streams.get(key)
        if stream is None:
            raise missing_stream_error(self.damaged_until_s)
        if stream.is_gone:
            raise StreamExpired("This stream was deleted; only its forks remain.")
        return stream

    def use(self, key: bytes) -> DurableStream:
        """Find a stream for a reader, which restarts its TTL. Raises: as `find`."""
        stream = self.find(key)
        self._touch(stream)
        return stream

    def create(self, key: bytes, creation: Creation, body: bytes) -> tuple[DurableStream, bool]:
        """Create a stream. Returns the stream and whether it is new. Raises: StreamConflict, SeqOutOfRange,
        StreamsFull, RequestError; UnknownStream and JournalDamaged for the source of a fork."""
        present = self._find_or_none(key)
        if present is None:
            created = self._plan_creation(creation, body)
            position = created.fork.position if created.fork is not None else 0
            self._check_room(_STREAM_BYTES + len(key) + position * _SHARED_BYTES + _cost(created.pieces))
            self._commit(key, created)
            return self.streams[key], True
        if not matches_creation(present, creation):
            raise StreamConflict("This path already has a stream with other settings.")
        self._touch(present)
        return present, False

    def append(self, key: bytes, batch: ProducerBatch) -> Receipt:
        """Append, close, or both. Raises: as `find`; StreamConflict and its subclasses, StaleEpoch, StreamsFull,
        RequestError."""
        stream = self.find(key)
        if not batch.body and not batch.closes:
            raise RequestError("The body of the append is empty.")
        if batch.body and batch.content_type is None:
            raise RequestError("The Content-Type header is missing.", param="content-type")
        if stream.is_closed:
            if batch.body and (batch.stamp is None or batch.stamp != stream.closed_by):
                raise StreamClosed(stream.end)
            return self._receipt(key, "repeated", batch.stamp)
        if batch.body and media_type(batch.content_type) != media_type(stream.content_type):
            raise StreamConflict("The stream has another content type.", param="content-type")
        pieces = read_pieces(batch.body, json=is_json(stream.content_type))
        if batch.body and not pieces:
            raise RequestError("An empty list appends nothing.")
        if batch.stamp is not None and is_duplicate(stream, batch.stamp):
            return self._receipt(key, "repeated", batch.stamp)
        if batch.seq is not None and stream.last_seq is not None and batch.seq <= stream.last_seq:
            raise StreamConflict("Stream-Seq must be larger than the last one.", param="stream-seq")
        is_new = batch.stamp is not None and batch.stamp.producer not in stream.producers
        self._check_room(_cost(pieces) + _PRODUCER_BYTES * is_new)
        self._commit(key, Appended(pieces, batch.stamp, batch.seq, batch.closes))
        return self._receipt(key, "appended" if pieces else "closed", batch.stamp)

    def delete(self, key: bytes) -> None:
        """Raises: as `find`."""
        self._remove(self.find(key))

    def delete_below(self, prefix: bytes) -> int:
        """Delete all streams whose keys start with `prefix`. Returns how many there were."""
        found = [stream for key, stream in self.streams.items() if key.startswith(prefix)]
        for stream in found:
            if stream.key in self.streams and not stream.is_gone:
                self._remove(stream)
        return len(found)

    def _find_or_none(self, key: bytes) -> DurableStream | None:
        try:
            return self.find(key)
        except (UnknownStream, JournalDamaged):  # a lost stream does not block its path
            return None
        except StreamExpired:
            raise StreamConflict("This path belongs to a deleted stream that still has forks.") from None

    def _plan_creation(self, creation: Creation, body: bytes) -> Created:
        content_type, ttl_s, expires_s, fork = creation.content_type, creation.ttl_s, creation.expires_s, None
        if creation.source is not None:
            source = self._source(creation.source)
            if content_type is not None and media_type(content_type) != media_type(source.content_type):
                raise StreamConflict("The source has another content type.", param="content-type")
            content_type = content_type or source.content_type
            if ttl_s is None and expires_s is None:
                ttl_s, expires_s = source.created.ttl_s, source.created.expires_s
            fork = fork_of(source, creation)
        content_type = content_type or "application/octet-stream"
        pieces = read_pieces(body, json=is_json(content_type))
        return Created(content_type, secrets.token_hex(6), pieces, ttl_s, expires_s, creation.closes, fork)

    def _source(self, key: bytes) -> DurableStream:
        try:
            return self.find(key)
        except StreamExpired:
            raise StreamConflict("The source of this fork was deleted.", param="stream-forked-from") from None

    def _receipt(self, key: bytes, outcome: Literal["appended", "closed", "repeated"], stamp: Stamp | None) -> Receipt:
        stream = self.streams[key]
        self._touch(stream)
        known = stream.producers.get(stamp.producer) if stamp is not None else None
        last = Stamp(stamp.producer, *known) if stamp is not None and known is not None else None
        return Receipt(outcome, stream.end, stream.is_closed, last)

    def _touch(self, stream: DurableStream) -> None:
        """Restart the TTL, also on the other servers."""
        stream.touch()
        if self.keeps_use and stream.is_use_due:
            self._commit(stream.key, Used())

    def _remove(self, stream: DurableStream) -> None:
        """Hide a stream that has forks. Drop a stream without forks, and also its hidden source if no other fork needs
        it."""
        if stream.num_forks:
            self._commit(stream.key, Hidden())
            return
        unneeded: DurableStream | None = stream
        while unneeded is not None:  # no recursion: clients may fork forks of forks
            self._commit(unneeded.key, Dropped())
            fork = unneeded.created.fork
            source = self.streams.get(fork.source) if fork is not None else None
            unneeded = source if source is not None and source.is_gone and not source.num_forks else None

    def _check_room(self, num_bytes: int) -> None:
        """Check that the budget has room, and remove expired streams if not. Raises: StreamsFull."""
        if self.num_bytes + num_bytes <= self.budget_bytes:
            return
        if time.monotonic() >= self.swept_s + _SWEEP_S:
            self.swept_s = time.monotonic()
            for stream in [stream for stream in self.streams.values() if stream.is_expired]:
                self._remove(stream)
        if self.num_bytes + num_bytes > self.budget_bytes:
            raise StreamsFull("The memory for durable streams is full. Delete streams, or raise --durable-bytes.")

    # Changes

    def _commit(self, key: bytes, change: DurableChange) -> None:
        self.journal(key, change)
        self.apply(key, change)

    def apply(self, key: bytes, change: DurableChange) -> None:
        """Change the state."""
        if isinstance(change, Created):
            self._begin(key, change)
            return
        stream = self._writable(key)
        stream.note()
        match change:
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
                    self._writable(stream.created.fork.source).num_forks -= 1
        stream.wake()

    def _writable(self, key: bytes) -> DurableStream:
        """Return a stream that is about to be changed."""
        return self.streams[key]

    def _begin(self, key: bytes, created: Created) -> None:
        stream = DurableStream(key, created)
        stream.is_halted = self._is_closing
        num_bytes = _STREAM_BYTES + len(key) + _cost(created.pieces)
        if created.fork is not None:
            source = self._writable(created.fork.source)
            source.num_forks += 1
            stream.chunks = source.chunks[: created.fork.position]
            num_bytes += len(stream.chunks) * _SHARED_BYTES
            if created.fork.part:
                part = source.chunks[created.fork.position].head(created.fork.part, json=is_json(created.content_type))
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
