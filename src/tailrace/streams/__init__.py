"""Streams: the append-only log of each request, and the readers that follow it.

The room's law: journal before log, log before wire. A log knows nothing of engines or sockets; readers pull at their
own pace with a cursor of their own, so that a slow one costs nobody anything; what was appended is never changed.
"""

from __future__ import annotations

from tailrace.streams._cipher import read_key
from tailrace.streams.cursor import event_id, parse_cursor
from tailrace.streams.disk import DiskJournal
from tailrace.streams.journal import Journal, MemoryJournal
from tailrace.streams.log import Reader, StreamLog
from tailrace.streams.record import Claim, Record
from tailrace.streams.store import StreamStore, is_stream_id, new_stream_id

__all__ = [
    "Claim",
    "DiskJournal",
    "Journal",
    "MemoryJournal",
    "Reader",
    "Record",
    "StreamLog",
    "StreamStore",
    "event_id",
    "is_stream_id",
    "new_stream_id",
    "parse_cursor",
    "read_key",
]
