"""Durable streams of a server that is alone, which keeps their records as notes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import msgspec

from tailrace.errors import JournalDamaged
from tailrace.server import LocalNotes
from tailrace_plugins.durable_streams.durable_records import Appended, Created, Dropped, DurableRecord
from tailrace_plugins.durable_streams.durable_store import DurableStore
from tailrace_plugins.durable_streams.durable_stream import DurableStream

__all__ = ["LocalDurableStreams", "open_local"]

logger = logging.getLogger("tailrace.journal")

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(DurableRecord).decode


class LocalDurableStreams:
    """`DurableStreams` of one server."""

    def __init__(self, store: DurableStore) -> None:
        self.store = store

    async def perform(self, operation: Callable[[DurableStore], T]) -> T:
        return operation(self.store)

    async def find(self, key: bytes) -> DurableStream:
        return self.store.find(key)

    async def use(self, key: bytes) -> DurableStream:
        return self.store.use(key)

    def close(self) -> None:
        self.store.close()


def open_local(notes: LocalNotes, budget_bytes: int) -> LocalDurableStreams:
    """Return the streams as the notes have them. Raises: StorageError."""

    def keep(key: bytes, record: DurableRecord) -> None:
        if isinstance(record, Dropped):
            notes.erase(key)
        else:
            notes.add(key, _encode(record))

    store = DurableStore(budget_bytes=budget_bytes, journal=keep)
    store.restore(_records(notes))
    store.damaged_until_s = notes.damaged_until_s
    return LocalDurableStreams(store)


def _records(notes: LocalNotes) -> Iterator[tuple[bytes, DurableRecord]]:
    """Yield the records in the order of the changes. A stream's records are deleted from the first one on that is
    damaged or depends on a damaged one; otherwise later appends would be read as if they followed the damage."""
    lengths: dict[bytes, int] = {}
    cuts: dict[bytes, int] = {}
    for row, key, body in notes.read():
        if key in cuts:
            continue
        try:
            record = _read(body)
            lengths[key] = _length(lengths, key, record)
        except JournalDamaged:
            end = "ends before the damage" if key in lengths else "is lost"
            logger.error("a durable stream was damaged on disk and %s", end)
            cuts[key] = row
            continue
        yield key, record
    if cuts:
        notes.cut(cuts)
    if not cuts.keys() <= lengths.keys():
        notes.record_damage()


def _read(body: bytes | None) -> DurableRecord:
    """Raises: JournalDamaged."""
    try:
        record: DurableRecord = _decode(body if body is not None else b"")
    except msgspec.DecodeError as error:
        raise JournalDamaged("not a record of a durable stream") from error
    return record


def _length(lengths: Mapping[bytes, int], key: bytes, record: DurableRecord) -> int:
    """Return how many appends a durable stream has after a record. `lengths` has the number of each stream before the
    record. Raises: JournalDamaged if the record depends on a lost one."""
    if isinstance(record, Created) and record.fork is not None:
        length = record.fork.position + bool(record.fork.part)
        if lengths.get(record.fork.source, -1) < length:
            raise JournalDamaged("a fork of a lost stream")
    elif isinstance(record, Created):
        length = 0
    elif key in lengths:
        length = lengths[key]
    else:
        raise JournalDamaged("a stream without its first record")
    return length + bool(record.pieces) if isinstance(record, Created | Appended) else length
