"""Looking at a stream page by page.

A position counts the appends before it. On the wire it is an offset: that count and the bytes so far, sixteen digits
each, so that offsets sort as text and one that was not given out here is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tailrace.errors import SeqOutOfRange

__all__ = ["Follower", "Page", "Readable", "offset_text", "page_of", "position_of"]

_OFFSET = re.compile(r"([0-9]{16})_[0-9]{16}", re.ASCII)


def offset_text(position: int, num_bytes: int) -> str:
    return f"{position:016d}_{num_bytes:016d}"


class Follower(Protocol):
    """One who waits at a cursor. A context manager for as long as it follows."""

    cursor: int

    def __enter__(self) -> Follower: ...
    def __exit__(self, *exc_info: object) -> None: ...
    async def wait(self) -> None:
        """Return when there is something behind the cursor, when nothing more will come, or when woken."""

    def wake(self) -> None: ...


class Readable(Protocol):
    """What can be read in the manner of a durable stream."""

    @property
    def content_type(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def tail(self) -> int:
        """The position behind all that is there."""

    @property
    def is_closed(self) -> bool: ...
    @property
    def is_gone(self) -> bool:
        """It was deleted while somebody followed it."""

    @property
    def is_halted(self) -> bool:
        """Nothing more comes from here: it was deleted, or the server goes away."""

    def offset(self, position: int) -> str: ...
    def take(self, position: int, limit_bytes: int) -> tuple[Sequence[bytes], int]:
        """What stands behind a position, and the position behind that: at least one append where there is one, and no
        further one once there are `limit_bytes`."""

    def follower(self, position: int) -> Follower: ...


@dataclass(frozen=True, slots=True)
class Page:
    """What one look at a stream shows."""

    content_type: str
    incarnation: str
    start: str  # offsets
    next: str
    pieces: Sequence[bytes]
    position: int  # of `next`
    is_up_to_date: bool
    is_closed: bool  # and this is its end


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


def position_of(stream: Readable, offset: str) -> int:
    """Raises: SeqOutOfRange for what is no offset of this stream."""
    match = _OFFSET.fullmatch(offset)
    position = int(match[1]) if match else -1
    if not 0 <= position <= stream.tail or stream.offset(position) != offset:
        raise SeqOutOfRange("This is not an offset of this stream.", param="offset")
    return position
