"""The operations that clients request on durable streams, and how repeated requests are recognized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tailrace.errors import RequestError, SeqOutOfRange
from tailrace_plugins.durable_streams.durable_changes import Fork, Stamp
from tailrace_plugins.durable_streams.durable_errors import SequenceGap, StaleEpoch
from tailrace_plugins.durable_streams.durable_stream import DurableStream, is_json
from tailrace_plugins.durable_streams.page import position_of

__all__ = ["Creation", "ProducerBatch", "Receipt", "fork_of", "is_duplicate", "matches_creation", "media_type"]


@dataclass(frozen=True, slots=True)
class Creation:
    """A request to create a stream."""

    content_type: str | None = None
    ttl_s: int | None = None
    expires_s: float | None = None  # since the epoch
    closes: bool = False
    source: bytes | None = None  # key of the stream to fork
    fork_offset: str | None = None  # None: the tail of the source
    fork_part: int = 0  # how much of the next append belongs to the fork: bytes, or messages of a JSON stream


@dataclass(frozen=True, slots=True)
class ProducerBatch:
    """A request to append, to close, or both."""

    body: bytes
    content_type: str | None = None
    closes: bool = False
    stamp: Stamp | None = None
    seq: str | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result of a batch."""

    outcome: Literal["appended", "closed", "repeated"]
    next_offset: str
    is_closed: bool
    stamp: Stamp | None = None  # of the last accepted batch of this producer


def media_type(content_type: str | None) -> str:
    """Return the media type in lower case, without parameters."""
    return (content_type or "").partition(";")[0].strip().lower()


def fork_of(source: DurableStream, creation: Creation) -> Fork:
    """Raises: SeqOutOfRange if the source does not have this offset or sub-offset."""
    position = source.tail if creation.fork_offset is None else position_of(source, creation.fork_offset)
    if creation.fork_part:
        if position == source.tail:
            raise SeqOutOfRange("There is no append after this offset.", param="stream-fork-sub-offset")
        source.chunks[position].head(creation.fork_part, json=is_json(source.content_type))
    return Fork(source.key, position, creation.fork_part, creation.fork_offset)


def matches_creation(stream: DurableStream, creation: Creation) -> bool:
    """Return whether an existing stream is what the request would create, so that a repeated request succeeds."""
    created, fork = stream.created, stream.created.fork
    if fork is None:
        times = (created.ttl_s, created.expires_s)
        is_same = creation.source is None and times == (creation.ttl_s, creation.expires_s)
        content_type = creation.content_type or "application/octet-stream"
    else:
        wanted = (creation.source, creation.fork_offset, creation.fork_part)
        is_same = (fork.source, fork.asked_offset, fork.part) == wanted
        if creation.ttl_s is not None or creation.expires_s is not None:
            is_same = is_same and (created.ttl_s, created.expires_s) == (creation.ttl_s, creation.expires_s)
        content_type = creation.content_type or created.content_type
    is_same = is_same and media_type(content_type) == media_type(created.content_type)
    return is_same and stream.is_closed == creation.closes


def is_duplicate(stream: DurableStream, stamp: Stamp) -> bool:
    """Return whether this batch was accepted before. Raises: StaleEpoch, SequenceGap, RequestError."""
    epoch, last = stream.producers.get(stamp.producer, (stamp.epoch, -1))
    if stamp.epoch < epoch:
        raise StaleEpoch(epoch)
    if stamp.epoch > epoch:
        if stamp.seq:
            raise RequestError("The first batch of an epoch must have number 0.", param="producer-seq")
        return False
    if stamp.seq > last + 1:
        raise SequenceGap(expected=last + 1, received=stamp.seq)
    return stamp.seq <= last
