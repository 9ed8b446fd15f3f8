"""The changes of durable streams. Each is complete, so replaying them restores the state.

The changes of all streams are replayed in the order of writing, because a fork starts with the content of its source.
After `Dropped`, the earlier changes of that stream are not needed.
"""

from __future__ import annotations

import msgspec

__all__ = ["Appended", "Created", "Dropped", "DurableChange", "Fork", "Hidden", "Stamp", "Used"]


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a batch of a producer."""

    producer: str
    epoch: int
    seq: int


class Fork(msgspec.Struct, frozen=True, array_like=True):
    """Where a stream forks from its source."""

    source: bytes  # key of the source
    position: int  # how many appends of the source the fork has
    part: int = 0  # how much of the next append it has: bytes, or messages of a JSON stream
    asked_offset: str | None = None  # as the client sent it; compared when the request is repeated


class Created(msgspec.Struct, frozen=True, tag=True):
    """A new stream. At most one of `ttl_s` and `expires_s` is set."""

    content_type: str
    incarnation: str  # random; differs from that of an earlier stream at the same path
    pieces: tuple[bytes, ...] = ()  # as in `Appended`
    ttl_s: int | None = None  # how long it lives without a read or write
    expires_s: float | None = None  # since the epoch
    is_closed: bool = False
    fork: Fork | None = None


class Appended(msgspec.Struct, frozen=True, tag=True):
    """An append, a close, or both, with the state of the producer: one change, so they are stored together."""

    pieces: tuple[bytes, ...] = ()  # messages of a JSON stream, else one byte string; () appends nothing
    stamp: Stamp | None = None
    seq: str | None = None  # Stream-Seq
    closes: bool = False


class Hidden(msgspec.Struct, frozen=True, tag=True):
    """Deleted or expired, but kept for its forks."""


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """Deleted or expired, with all its content."""


class Used(msgspec.Struct, frozen=True, tag=True):
    """Read. Other servers restart the TTL."""


DurableChange = Created | Appended | Hidden | Dropped | Used
