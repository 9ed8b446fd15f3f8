"""Event ids as they stand on the wire: `<stream id>-<seq>`, so that a bare Last-Event-ID finds stream and position."""

from __future__ import annotations

import re

from tailrace.errors import ForeignCursor, SeqOutOfRange

__all__ = ["event_id", "parse_cursor"]

_SEQ = re.compile(r"(?:0|[1-9][0-9]{0,14})", re.ASCII)
_EVENT_ID = re.compile(r"([A-Za-z0-9_-]{1,64})-(0|[1-9][0-9]{0,14})", re.ASCII)


def event_id(stream_id: str, seq: int) -> str:
    return f"{stream_id}-{seq}"


def parse_cursor(cursor: str, stream_id: str | None = None) -> tuple[str, int]:
    """The stream and the last `seq` seen, out of an event id or, where the stream is known, a bare number.

    Raises: SeqOutOfRange if it is neither, ForeignCursor if it belongs to another stream than `stream_id`.
    """
    if stream_id is not None and _SEQ.fullmatch(cursor):
        return stream_id, int(cursor)
    match = _EVENT_ID.fullmatch(cursor)
    if match is None:
        raise SeqOutOfRange("This is not an event id of this server.", param="last-event-id")
    if stream_id is not None and match[1] != stream_id:
        raise ForeignCursor("This event id belongs to another stream.", param="last-event-id")
    return match[1], int(match[2])
