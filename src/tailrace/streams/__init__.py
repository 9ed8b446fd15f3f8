"""Streams: the append-only log of each request, and the readers that follow it.

Order of writes: first the store, then the log, then the wire. A log knows nothing about engines or sockets. Each reader
has its own cursor and pulls events at its own pace, so a slow reader delays nobody. Events are never changed after they
are appended.
"""

from __future__ import annotations

from tailrace.streams.log import Reader, StreamLog, Taken
from tailrace.streams.log_store import Lease, LogStore, StoreState
from tailrace.streams.memory_store import MemoryLogStore
from tailrace.streams.producer import Ender, Producer
from tailrace.streams.rows import read_journal_key
from tailrace.streams.sqlite_store import SqliteLogStore, open_sqlite
from tailrace.streams.write_errors import WriteErrors

__all__ = [
    "Ender",
    "Lease",
    "LogStore",
    "MemoryLogStore",
    "Producer",
    "Reader",
    "SqliteLogStore",
    "StoreState",
    "StreamLog",
    "Taken",
    "WriteErrors",
    "open_sqlite",
    "read_journal_key",
]
