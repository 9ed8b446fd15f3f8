"""What clients ask of durable streams, and by which rules it is compared with what is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tailrace.durable.page import position_of
from tailrace.durable.records import Fork, Stamp
from tailrace.durable.stream import DurableStream, is_json
from tailrace.errors import RequestError, SeqOutOfRange, SequenceGap, StaleEpoch

__all__ = ["Creation", "ProducerBatch", "Receipt", "fork_of", "is_as_asked", "is_repeated", "kind_of"]


@dataclass(frozen=True, slots=True)
class Creation:
    """A stream as it is asked for."""

    content_type: str | None = None
    ttl_s: int | None = None
    expires_s: float | None = None  # since the epoch
    closes: bool = False
    source: bytes | None = None  # the stream to fork
    fork_offset: str | None = None  # None: its tail
    fork_part: int = 0  # past that offset: bytes, or messages of JSON


@dataclass(frozen=True, slots=True)
class ProducerBatch:
    """An append as it is asked for."""

    body: bytes
    content_type: str | None = None
    closes: bool = False
    stamp: Stamp | None = None
    seq: str | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a batch."""

    outcome: Literal["appended", "closed", "repeated"]
    next_offset: str
    is_closed: bool
    stamp: Stamp | None = None  # the last batch accepted of this producer


def kind_of(content_type: str | None) -> str:
    """What is compared of content types: not their parameters."""
    return (content_type or "").partition(";")[0].strip().lower()


def fork_of(source: DurableStream, asked: Creation) -> Fork:
    """Raises: SeqOutOfRange for a place that the source does not have."""
    position = source.tail if asked.fork_offset is None else position_of(source, asked.fork_offset)
    if asked.fork_part:
        if position == source.tail:
            raise SeqOutOfRange("Behind that offset there is no append.", param="stream-fork-sub-offset")
        source.chunks[position].cut(asked.fork_part, json=is_json(source.content_type))
    return Fork(source.key, position, asked.fork_part, asked.fork_offset)


def is_as_asked(stream: DurableStream, asked: Creation) -> bool:
    """Whether a repeated request to create means the stream that is there."""
    created, fork = stream.created, stream.created.fork
    if fork is None:
        times = (created.ttl_s, created.expires_s)
        is_same = asked.source is None and times == (asked.ttl_s, asked.expires_s)
        content_type = asked.content_type or "application/octet-stream"
    else:
        is_same = (fork.source, fork.asked_offset, fork.part) == (asked.source, asked.fork_offset, asked.fork_part)
        if asked.ttl_s is not None or asked.expires_s is not None:
            is_same = is_same and (created.ttl_s, created.expires_s) == (asked.ttl_s, asked.expires_s)
        content_type = asked.content_type or created.content_type
    return is_same and kind_of(content_type) == kind_of(created.content_type) and stream.is_closed == asked.closes


def is_repeated(stream: DurableStream, stamp: Stamp) -> bool:
    """Whether this batch was accepted before. Raises: StaleEpoch, SequenceGap, RequestError for one that cannot be."""
    epoch, last = stream.producers.get(stamp.producer, (stamp.epoch, -1))
    if stamp.epoch < epoch:
        raise StaleEpoch(epoch)
    if stamp.epoch > epoch:
        if stamp.seq:
            raise RequestError("An epoch begins with batch 0.", param="producer-seq")
        return False
    if stamp.seq > last + 1:
        raise SequenceGap(expected=last + 1, received=stamp.seq)
    return stamp.seq <= last
