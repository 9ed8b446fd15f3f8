"""Pages of a stream, and the offsets between them.

A position is the number of appends before it. On the wire a position is an offset: the position and the number of bytes
before it, with sixteen digits each. So offsets sort as text, and an invented offset is detected.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tailrace.errors import SeqOutOfRange, TailraceError
from tailrace.server import Follower

__all__ = ["Page", "Readable", "asked_position", "next_page", "offset_text", "page_of", "position_of"]

_OFFSET = re.compile(r"([0-9]{16})_[0-9]{16}", re.ASCII)


def offset_text(position: int, num_bytes: int) -> str:
    return f"{position:016d}_{num_bytes:016d}"


class Readable(Protocol):
    """A stream that can be read with the protocol."""

    @property
    def content_type(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def tail(self) -> int:
        """Return the position after the last append."""

    @property
    def is_closed(self) -> bool: ...
    @property
    def released(self) -> TailraceError | None:
        """Return why followers must leave; None if they may stay. They get the appends that are there before."""

    def offset(self, position: int) -> str: ...
    def take(self, position: int, limit_bytes: int) -> tuple[Sequence[bytes], int]:
        """Return the pieces after a position, and the position after them. Takes at least one append if there is one,
        and stops when there are `limit_bytes` or more."""

    def follower(self, position: int) -> Follower: ...


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a stream."""

    content_type: str
    incarnation: str
    start: str  # offsets
    next: str
    pieces: Sequence[bytes]
    position: int  # of `next`
    is_up_to_date: bool
    is_closed: bool  # the stream is closed, and this page is its end


def page_of(stream: Readable, position: int, limit_bytes: int) -> Page:
    pieces, end = stream.take(position, limit_bytes)
    at_tail = end == stream.tail
    return Page(
        content_type=stream.content_type,
        incarnation=stream.incarnation,
        start=stream.offset(position),
        next=stream.offset(end),
        pieces=pieces,
        position=end,
        is_up_to_date=at_tail,
        is_closed=at_tail and stream.is_closed,
    )


async def next_page(
    stream: Readable, follower: Follower, limit_bytes: int, *, at_most_s: float
) -> Page | TailraceError:
    """Wait for an append for at most `at_most_s`. Returns the follower's next page, which may be empty, or why it must
    leave."""
    await follower.wait(at_most_s)
    page = page_of(stream, follower.cursor, limit_bytes)
    if not page.pieces and not page.is_closed and (reason := stream.released) is not None:
        return reason
    follower.cursor = page.position
    return page


def asked_position(offset: str | None) -> int:
    """Return the position in an offset, or 0 if it is none."""
    match = _OFFSET.fullmatch(offset or "")
    return int(match[1]) if match else 0


def position_of(stream: Readable, offset: str) -> int:
    """Raises: SeqOutOfRange if the text is not an offset of this stream."""
    match = _OFFSET.fullmatch(offset)
    position = int(match[1]) if match else -1
    if not 0 <= position <= stream.tail or stream.offset(position) != offset:
        raise SeqOutOfRange("This is not an offset of this stream.", param="offset")
    return position
