"""Durable streams of a server that is alone, which keeps their changes as notes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import msgspec

from tailrace.errors import JournalDamaged
from tailrace.server import LocalNotes
from tailrace_plugins.durable_streams.durable_changes import Appended, Created, Dropped, DurableChange
from tailrace_plugins.durable_streams.durable_store import DurableStore
from tailrace_plugins.durable_streams.durable_stream import DurableStream

__all__ = ["LocalDurableStreams", "open_local"]

logger = logging.getLogger("tailrace.journal")

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(DurableChange).decode


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

    def keep(key: bytes, change: DurableChange) -> None:
        if isinstance(change, Dropped):
            notes.erase(key)
        else:
            notes.add(key, _encode(change))

    store = DurableStore(budget_bytes=budget_bytes, journal=keep)
    store.restore(_changes(notes))
    store.damaged_until_s = notes.damaged_until_s
    return LocalDurableStreams(store)


def _changes(notes: LocalNotes) -> Iterator[tuple[bytes, DurableChange]]:
    """Yield the changes in their order. A stream's changes are deleted from the first one on that is
    damaged or depends on a damaged one; otherwise later appends would be read as if they followed the damage."""
    lengths: dict[bytes, int] = {}
    cuts: dict[bytes, int] = {}
    for row, key, body in notes.read():
        if key in cuts:
            continue
        try:
            change = _read(body)
            lengths[key] = _length(lengths, key, change)
        except JournalDamaged:
            end = "ends before the damage" if key in lengths else "is lost"
            logger.error("a durable stream was damaged on disk and %s", end)
            cuts[key] = row
            continue
        yield key, change
    if cuts:
        notes.cut(cuts)
    if not cuts.keys() <= lengths.keys():
        notes.record_damage()


def _read(body: bytes | None) -> DurableChange:
    """Raises: JournalDamaged."""
    try:
        change: DurableChange = _decode(body if body is not None else b"")
    except msgspec.DecodeError as error:
        raise JournalDamaged("not a change of a durable stream") from error
    return change


def _length(lengths: Mapping[bytes, int], key: bytes, change: DurableChange) -> int:
    """Return how many appends a durable stream has after a change. `lengths` has the number of each stream before the
    change. Raises: JournalDamaged if the change depends on a lost one."""
    if isinstance(change, Created) and change.fork is not None:
        length = change.fork.position + bool(change.fork.part)
        if lengths.get(change.fork.source, -1) < length:
            raise JournalDamaged("a fork of a lost stream")
    elif isinstance(change, Created):
        length = 0
    elif key in lengths:
        length = lengths[key]
    else:
        raise JournalDamaged("a stream without its first change")
    return length + bool(change.pieces) if isinstance(change, Created | Appended) else length
