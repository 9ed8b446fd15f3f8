"""One durable stream: its appends, and the readers that follow it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

import msgspec

from tailrace.errors import SeqOutOfRange, StorageError, TailraceError, UnknownStream
from tailrace.server import Follower
from tailrace_plugins.durable_streams.durable_changes import Created, Stamp
from tailrace_plugins.durable_streams.page import offset_text

__all__ = ["Chunk", "DurableReader", "DurableStream", "is_json"]

_NOTED_PART = 0.1  # share of the TTL after which another use is kept for other servers


def is_json(content_type: str) -> bool:
    """Return whether a stream of this content type consists of JSON messages."""
    return content_type.partition(";")[0].strip().lower() == "application/json"


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One append. A fork shares the chunks of its source."""

    pieces: tuple[bytes, ...]
    end_bytes: int  # bytes of the stream up to the end of this chunk

    def head(self, part: int, *, json: bool) -> tuple[bytes, ...]:
        """Return the first `part` bytes or JSON messages. Raises: SeqOutOfRange if there are fewer."""
        if part > (len(self.pieces) if json else len(self.pieces[0])):
            raise SeqOutOfRange("The sub-offset is larger than the next append.", param="stream-fork-sub-offset")
        return self.pieces[:part] if json else (self.pieces[0][:part],)


class DurableStream:
    """The state of a stream. Only `DurableStore.apply` changes it."""

    __slots__ = (
        "_waiting",
        "chunks",
        "closed_by",
        "created",
        "is_closed",
        "is_gone",
        "is_halted",
        "key",
        "last_seq",
        "noted_s",
        "num_bytes",
        "num_forks",
        "num_readers",
        "producers",
        "touched_s",
    )

    def __init__(self, key: bytes, created: Created, chunks: Sequence[Chunk] = ()) -> None:
        self.key = key
        self.created = created
        self.chunks = list(chunks)
        self.producers: dict[str, tuple[int, int]] = {}  # name: epoch, last seq in this epoch
        self.last_seq: str | None = None
        self.is_closed = created.is_closed
        self.closed_by: Stamp | None = None
        self.is_gone = False
        self.is_halted = False
        self.num_forks = 0
        self.num_readers = 0
        self.num_bytes = 0  # charged to the store
        self.touched_s = self.noted_s = time.monotonic()  # last use, and last change
        self._waiting: dict[DurableReader, None] = {}

    @property
    def content_type(self) -> str:
        return self.created.content_type

    @property
    def incarnation(self) -> str:
        return self.created.incarnation

    @property
    def tail(self) -> int:
        return len(self.chunks)

    @property
    def end(self) -> str:
        """Return the offset of the tail."""
        return self.offset(len(self.chunks))

    @property
    def is_expired(self) -> bool:
        """Return whether the stream can be removed: it has expired, or it was deleted and has no forks any more. A TTL
        does not run while a reader follows the stream."""
        created = self.created
        if self.is_gone:
            return not self.num_forks
        if created.expires_s is not None:
            return time.time() >= created.expires_s
        if created.ttl_s is None or self.num_readers:
            return False
        return time.monotonic() >= self.touched_s + created.ttl_s

    @property
    def is_use_due(self) -> bool:
        """Return whether the use of the stream must be kept again, because a tenth of its TTL has passed since the
        last change."""
        ttl_s = self.created.ttl_s
        return ttl_s is not None and time.monotonic() >= self.noted_s + ttl_s * _NOTED_PART

    def touch(self) -> None:
        """Restart the TTL, after a read or write."""
        self.touched_s = time.monotonic()

    def note(self) -> None:
        """Restart the TTL. Called for a change that all servers get."""
        self.touched_s = self.noted_s = time.monotonic()

    def copy(self) -> DurableStream:
        """Return another stream with the same state, which no reader follows."""
        copied = DurableStream(self.key, self.created, self.chunks)
        copied.producers = dict(self.producers)
        copied.last_seq = self.last_seq
        copied.is_closed, copied.closed_by = self.is_closed, self.closed_by
        copied.is_gone, copied.is_halted = self.is_gone, self.is_halted
        copied.num_forks, copied.num_readers, copied.num_bytes = self.num_forks, self.num_readers, self.num_bytes
        copied.touched_s, copied.noted_s = self.touched_s, self.noted_s
        return copied

    def offset(self, position: int) -> str:
        return offset_text(position, self.chunks[position - 1].end_bytes if position else 0)

    def take(self, position: int, limit_bytes: int) -> tuple[Sequence[bytes], int]:
        pieces: list[bytes] = []
        begin_bytes = self.chunks[position - 1].end_bytes if position else 0
        while position < len(self.chunks):
            chunk = self.chunks[position]
            pieces += chunk.pieces
            position += 1
            if chunk.end_bytes - begin_bytes >= limit_bytes:
                break
        return pieces, position

    def extend(self, pieces: tuple[bytes, ...]) -> None:
        if pieces:
            begin_bytes = self.chunks[-1].end_bytes if self.chunks else 0
            self.chunks.append(Chunk(pieces, begin_bytes + sum(map(len, pieces))))

    def follower(self, position: int) -> DurableReader:
        return DurableReader(self, position)

    @property
    def released(self) -> TailraceError | None:
        if self.is_gone:
            return UnknownStream("This stream was deleted.")
        # An empty answer would bring the client back at once.
        reason = StorageError("The stream goes on, but not on this server. Ask again.")
        return reason if self.is_halted else None

    def halt(self) -> None:
        """Send away all followers."""
        self.is_halted = True
        self.wake()

    def wake(self) -> None:
        """Wake all followers."""
        for reader in list(self._waiting):
            reader.wake()


@final
class DurableReader(Follower):
    """A reader that follows a durable stream. The stream's TTL does not run while it is open."""

    __slots__ = ("_stream",)

    def __init__(self, stream: DurableStream, cursor: int) -> None:
        super().__init__(cursor)
        self._stream = stream

    def __enter__(self) -> DurableReader:
        self._stream.num_readers += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stream.num_readers -= 1
        self._stream.touch()

    def waiting(self) -> dict[DurableReader, None] | None:
        stream = self._stream
        return None if self.cursor < stream.tail or stream.is_closed or stream.is_halted else stream._waiting
