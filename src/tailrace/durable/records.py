"""What happens to durable streams, as records: each says one change whole, so that replaying them gives the same state.

Records of all streams are replayed in the order in which they were made, since a fork begins with what its source held.
After `Dropped`, no earlier record of that stream is of use to anybody.
"""

from __future__ import annotations

import msgspec

__all__ = ["Appended", "Created", "Dropped", "DurableRecord", "Fork", "Hidden", "Stamp"]


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """Which batch of which producer an append is."""

    producer: str
    epoch: int
    seq: int


class Fork(msgspec.Struct, frozen=True, array_like=True):
    """Where a stream branches off from another."""

    source: bytes  # its key
    position: int  # so many appends of the source, from its first
    part: int = 0  # of the append behind them: so many bytes, or messages of JSON
    asked_offset: str | None = None  # as the client gave it, by which a repeated request is known


class Created(msgspec.Struct, frozen=True, tag=True):
    """A new stream. At most one of `ttl_s` and `expires_s` is set."""

    content_type: str
    incarnation: str  # random; tells this stream from an earlier one at its path
    pieces: tuple[bytes, ...] = ()  # as in `Appended`
    ttl_s: int | None = None  # how long it lives with nobody reading or writing
    expires_s: float | None = None  # since the epoch
    is_closed: bool = False
    fork: Fork | None = None


class Appended(msgspec.Struct, frozen=True, tag=True):
    """An append, a closing, or both at once; and the state of its producer, so that one cannot be kept without the
    other."""

    pieces: tuple[bytes, ...] = ()  # the messages of a JSON stream, otherwise one run of bytes; () appends nothing
    stamp: Stamp | None = None
    seq: str | None = None  # Stream-Seq
    closes: bool = False


class Hidden(msgspec.Struct, frozen=True, tag=True):
    """Deleted, or at the end of its life, and kept for the forks that begin with it."""


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """Gone, with all that it held."""


DurableRecord = Created | Appended | Hidden | Dropped
