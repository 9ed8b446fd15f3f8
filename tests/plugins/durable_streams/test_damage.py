"""Durable streams in a journal with a damaged row."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tailrace.errors import JournalDamaged, StreamError, UnknownStream
from tailrace.streams.damage import damaged_until_s
from tailrace.streams.disk import DiskJournal
from tailrace.streams.notes import LocalNotes
from tailrace_plugins.durable_streams.durable_store import DurableStore
from tailrace_plugins.durable_streams.local_durable_streams import open_local
from tailrace_plugins.durable_streams.operations import Creation, ProducerBatch

TEXT = Creation("text/plain")
# The records in their order: whose each is.
RECORDS = (b"source", b"source", b"source", b"fork", b"fork", b"other", b"other")
WHOLE = {b"source": b"one two three", b"fork": b"one two 4", b"other": b"five six"}


def append(store: DurableStore, key: bytes, body: bytes) -> None:
    store.append(key, ProducerBatch(body, "text/plain"))


@contextmanager
def opened(directory: Path) -> Iterator[DurableStore]:
    """Open the streams as a server does."""
    with closing(DiskJournal(directory)) as journal:
        notes = LocalNotes("durable", journal, lambda: damaged_until_s(journal.damage_age_s(), 900.0))
        yield open_local(notes, 10**6).store


def content(store: DurableStore, key: bytes) -> bytes | None:
    """Return the content of a stream; None if it is reported as lost."""
    try:
        stream = store.find(key)
    except JournalDamaged:
        return None
    return b"".join(stream.take(0, 10**9)[0])


def write(directory: Path) -> None:
    with opened(directory) as store:
        store.create(b"source", TEXT, b"one ")
        append(store, b"source", b"two ")
        append(store, b"source", b"three")
        offset = store.find(b"source").offset(2)
        store.create(b"fork", Creation(source=b"source", fork_offset=offset), b"")
        append(store, b"fork", b"4")
        store.create(b"other", TEXT, b"five ")
        append(store, b"other", b"six")


def damage(directory: Path, column: str, row: int) -> None:
    with closing(sqlite3.connect(directory / "journal.sqlite", isolation_level=None)) as connection:
        ((number, value),) = connection.execute(
            f"SELECT row, {column} FROM notes ORDER BY row LIMIT 1 OFFSET ?",
            (row,),
        )
        other = value + 1 if isinstance(value, int) else value[:-1] + bytes([value[-1] ^ 1])
        connection.execute(f"UPDATE notes SET {column} = ? WHERE row = ?", (other, number))


@pytest.mark.parametrize("row", range(len(RECORDS)))
@pytest.mark.parametrize("column", ["body", "crc"])
def test_a_stream_ends_at_the_damage(tmp_path: Path, column: str, row: int) -> None:
    write(tmp_path)
    damage(tmp_path, column, row)
    hit = RECORDS[row]
    is_first = RECORDS.index(hit) == row
    with opened(tmp_path) as store:
        found = {key: content(store, key) for key in WHOLE}
        for key, whole in WHOLE.items():
            part = found[key]
            assert whole.startswith(part or b"")
            rests_on_it = (key, hit, row) in ((b"fork", b"source", 0), (b"fork", b"source", 1))
            assert (part is None) == ((is_first and key == hit) or rests_on_it)
            if key != hit and not rests_on_it:
                assert part == whole
        assert found[hit] != WHOLE[hit]
        for key, part in found.items():
            if part is None:
                assert store.create(key, TEXT, b"anew")[1]
            else:
                append(store, key, b" and on")
    with opened(tmp_path) as store:
        for key, part in found.items():
            assert content(store, key) == (b"anew" if part is None else part + b" and on")


@pytest.mark.parametrize("row", range(len(RECORDS)))
def test_a_record_without_a_stream_affects_no_other(tmp_path: Path, row: int) -> None:
    write(tmp_path)
    damage(tmp_path, "key", row)
    for _ in range(2):
        with opened(tmp_path) as store:
            for key in WHOLE.keys() - {RECORDS[row]} - ({b"fork"} if RECORDS[row] == b"source" else set()):
                assert content(store, key) == WHOLE[key]


def test_after_damage_a_missing_stream_is_reported_as_lost(tmp_path: Path) -> None:
    write(tmp_path)
    damage(tmp_path, "body", 0)
    with opened(tmp_path) as store:
        for key in (b"source", b"never"):
            for refused in (store.find, store.delete, lambda key: append(store, key, b"x")):
                with pytest.raises(JournalDamaged):
                    refused(key)
        with pytest.raises(JournalDamaged):
            store.create(b"new", Creation(source=b"source"), b"")
        store.damaged_until_s = time.monotonic()
        with pytest.raises(UnknownStream):
            store.find(b"source")


def test_without_damage_it_is_unknown(tmp_path: Path) -> None:
    write(tmp_path)
    with opened(tmp_path) as store, pytest.raises(StreamError):
        store.find(b"never")
