"""Streams: the append-only log of each request, and the readers that follow it.

The room's law: log before wire. A log knows nothing of engines or sockets; readers pull at their own pace with a cursor
of their own, so that a slow one costs nobody anything; what was appended is never changed.
"""

from __future__ import annotations

from tailrace.streams.cursor import event_id, parse_cursor
from tailrace.streams.log import Reader, StreamLog
from tailrace.streams.store import StreamStore

__all__ = ["Reader", "StreamLog", "StreamStore", "event_id", "parse_cursor"]
