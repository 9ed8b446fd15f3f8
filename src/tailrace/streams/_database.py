"""The journal file: an SQLite database in WAL mode. One process writes it, through one connection.

Events of running streams are appended to the table `tail`: one row per stream and turn of the event loop. So a commit
touches one or two pages. When a stream has ended, its events move into one row of `streams`. Rows have checksums that
also cover the row key. A row that was moved or changed is ignored.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from tailrace.errors import ModelError, StorageError
from tailrace.streams._clock import age_s, stamp
from tailrace.streams._files import has_lost_commits, hold_lock, open_own
from tailrace.streams._reserve import Reserve
from tailrace.streams._schema import DATA_DIR_HINT, migrate
from tailrace.streams._sqlite_errors import as_storage_error, is_damage
from tailrace.streams.rows import checksum, intact
from tailrace.system.file_systems import NEEDS_LOCAL_DISK, lacks_locks, warn_of_network
from tailrace.types import ANONYMOUS

__all__ = ["DAMAGED_PROPERTY", "Database", "FinishedRow", "TailRow"]

_LOCK_MS = 50
_WAL_BYTES = 16 * 2**20  # file size to which the write-ahead log is truncated when it restarts
_SWEEP_ROWS = 4_000  # per sweep: takes a few milliseconds
_SWEEP_STREAMS = 500
_INSERT_STREAM = "INSERT INTO streams (stream_id, record, record_crc, owner) VALUES (?, ?, ?, ?)"
_INSERT, _ROW = "INSERT INTO tail (row, stream, seq, events, crc) VALUES ", "(?, ?, ?, ?, ?)"
_ROWS_AT_ONCE = 128  # older builds of SQLite allow 999 values in a statement
DAMAGED_PROPERTY = "damaged"  # the time when streams were lost


class TailRow(NamedTuple):
    """Events of a running stream. `seq` is the number of the first event. `events` is None if the row is damaged."""

    stream: int
    seq: int
    events: bytes | None


class FinishedRow(NamedTuple):
    """A finished stream."""

    number: int
    stream_id: str
    record: bytes
    events: bytes
    finished: str  # timestamp (`_clock.stamp`)


class _Sweep(NamedTuple):
    """A pass over the tail that deletes dead rows, from `row` to `last`."""

    dead: list[int]
    row: int
    last: int


class Database:
    """The connection to the journal file.

    All methods that write raise StorageError, or JournalFull if the disk is full. With `erases`, SQLite overwrites
    deleted data with zeros.

    Raises: ModelError if the file cannot be opened: another server uses it, a newer version wrote it, or the directory
    is not writable.
    """

    def __init__(self, directory: Path, *, erases: bool = False) -> None:
        self.path = directory / "journal.sqlite"
        self._erases = erases
        self.reserve = Reserve(directory)
        try:
            self._lock = hold_lock(directory / "journal.lock")
        except BlockingIOError:
            raise ModelError(f"Another server uses the journal in {directory}. {DATA_DIR_HINT}") from None
        except OSError as error:
            why = f"{error.strerror}. {NEEDS_LOCAL_DISK}" if lacks_locks(error) else f"{error.strerror}."
            raise ModelError(f"The journal cannot be kept in {directory}: {why} {DATA_DIR_HINT}") from None
        self.has_lost_commits = False  # whether the end of the write-ahead log was damaged and is lost
        warn_of_network(self.path)
        self._num_rows = 0  # the largest row number of the tail
        self._dead: set[int] = set()  # streams whose rows of the tail can be deleted
        self._sweep: _Sweep | None = None
        try:
            self.damaged_path = self._open()
            self.set_lock_wait(True)
            if self.has_lost_commits or self.damaged_path is not None:
                self.record_damage()
            with self._writing() as connection:
                connection.execute(
                    "DELETE FROM tail WHERE stream NOT IN (SELECT number FROM streams WHERE finished IS NULL)"
                )
            (self._num_rows,) = self._connection.execute("SELECT coalesce(max(row), 0) FROM tail").fetchone()
        except StorageError as error:
            self._connection.close()
            os.close(self._lock)
            raise ModelError(f"The journal cannot be kept in {directory}: {error.message} {DATA_DIR_HINT}") from None
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self) -> Path | None:
        """Open the file. A damaged file is renamed, and a new one is created; returns the path of the renamed file."""
        try:
            self._connection = self._open_writer()
            return None
        except OSError as error:
            raise ModelError(f"The journal {self.path} cannot be opened: {error.strerror}. {DATA_DIR_HINT}") from None
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                why = f"{error}. {NEEDS_LOCAL_DISK}" if lacks_locks(error) else f"{error}."
                raise ModelError(f"The journal {self.path} cannot be opened: {why} {DATA_DIR_HINT}") from None
        except UnicodeDecodeError:
            pass  # the name of a table is damaged, so SQLite's error message cannot be decoded
        aside = self.path.with_name(f"journal.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S}.sqlite")
        self.path.rename(aside)
        for suffix in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                self.path.with_name(self.path.name + suffix).rename(aside.with_name(aside.name + suffix))
        self._connection = self._open_writer()
        return aside

    def _open_writer(self) -> sqlite3.Connection:
        """Open the connection that writes. Creates the file if it is missing, and checks that it is not damaged."""
        # SQLite would create a file that other users can read. Its further files get the mode of this one. Do this only
        # before the database is open: closing any descriptor of a file releases all locks of the process on it.
        os.close(open_own(self.path, os.O_RDWR))
        connection = self.connect(is_first=True)
        try:
            migrate(connection, self.path)
        except BaseException:
            connection.close()
            raise
        return connection

    def connect(self, *, is_first: bool = False) -> sqlite3.Connection:
        """Open a connection: the first one writes, the second one runs checkpoints in a thread."""
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        connection.text_factory = lambda text: text.decode("utf-8", "replace")  # checksums find damage
        try:
            if is_first:  # before any write, which could overwrite the lost commits
                _, num_read, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                self.has_lost_commits = has_lost_commits(self.path.with_name(self.path.name + "-wal"), max(num_read, 0))
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            connection.execute(f"PRAGMA secure_delete = {'ON' if self._erases else 'FAST'}")
            connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        except BaseException:
            connection.close()
            raise
        return connection

    def set_lock_wait(self, waits: bool) -> None:
        """Set whether a write waits for a locked database. After a write failed, it must not block the event loop
        again."""
        self._connection.execute(f"PRAGMA busy_timeout = {_LOCK_MS if waits else 0}")

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Run the block in a transaction: commit it, or roll it back if the block raises."""
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise as_storage_error(error) from error

    def _select(self, query: str, *values: object) -> Iterator[Any]:  # Any: the columns depend on the query
        try:
            yield from self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise as_storage_error(error) from error

    def read_property(self, name: str) -> bytes | None:
        """Return the value that is stored under a name, or None."""
        row = next(self._select("SELECT value FROM facts WHERE name = ?", name), None)
        return row[0] if row is not None else None

    def write_property(self, name: str, value: bytes) -> None:
        with self._writing() as connection:
            connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def record_damage(self) -> None:
        """Store the time at which an unknown set of streams was lost: now."""
        self.write_property(DAMAGED_PROPERTY, stamp().encode())

    def damage_age_s(self) -> float | None:
        """Return the seconds since streams were lost because the file was damaged; None if no loss is recorded."""
        try:
            kept = self.read_property(DAMAGED_PROPERTY)
            return None if kept is None else age_s(kept.decode())
        except (AttributeError, UnicodeDecodeError, ValueError):  # the property may be damaged, too
            return None

    def begin(self, stream_id: str, record: bytes, owner: str = ANONYMOUS) -> int:
        """Write a new stream; returns its number."""
        values = stream_id, record, checksum(record, stream_id), owner
        try:  # without BEGIN and COMMIT, as in `append`
            cursor = self._connection.execute(_INSERT_STREAM, values)
        except sqlite3.Error as error:
            raise as_storage_error(error) from error
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def append(self, rows: Sequence[TailRow]) -> None:
        """Write rows of the tail in one transaction."""
        # A single statement is a transaction by itself. BEGIN and COMMIT would add a third to the time.
        if len(rows) <= _ROWS_AT_ONCE:
            try:
                self._insert(rows, self._num_rows + 1)
            except sqlite3.Error as error:
                raise as_storage_error(error) from error
        else:
            with self._writing():
                for start in range(0, len(rows), _ROWS_AT_ONCE):
                    self._insert(rows[start : start + _ROWS_AT_ONCE], self._num_rows + 1 + start)
        self._num_rows += len(rows)

    def _insert(self, rows: Sequence[TailRow], first: int) -> None:
        values: list[object] = []
        for number, (stream, seq, events) in enumerate(rows, first):
            values += (number, stream, seq, events, checksum(events or b"", stream, seq))
        self._connection.execute(_INSERT + ",".join([_ROW] * len(rows)), values)

    def finish(self, streams: Sequence[FinishedRow]) -> None:
        """Write each finished stream into one row. Its rows of the tail are dead from then on."""
        with self._writing() as connection:
            connection.executemany(
                "UPDATE streams SET record = ?, record_crc = ?, events = ?, events_crc = ?, finished = ?"
                " WHERE number = ?",
                [
                    (record, checksum(record, stream_id), events, checksum(events, number), finished, number)
                    for number, stream_id, record, events, finished in streams
                ],
            )
        self._dead.update(stream.number for stream in streams)

    def drop(self, streams: Sequence[tuple[int, str]], *, most_expired: int) -> None:
        """Replace finished streams, given as (number, id), by tombstones."""
        self.forget([stream_id for _, stream_id in streams], most_expired=most_expired)
        self._dead.update(number for number, _ in streams)

    def sweep(self) -> bool:
        """Delete some dead rows of the tail. Returns whether there are more.

        Rows of streams that ran at the same time are interleaved. So one pass deletes the rows of all streams that are
        dead when it starts.
        """
        if self._sweep is None:
            if not self._dead:
                return False
            ((first,),) = self._select("SELECT coalesce(min(row), 0) FROM tail")
            dead = [self._dead.pop() for _ in range(min(len(self._dead), _SWEEP_STREAMS))]
            self._sweep = _Sweep(dead, first, self._num_rows)
        dead, row, last = self._sweep
        marks = ",".join("?" * len(dead))
        with self._writing() as connection:
            connection.execute(
                f"DELETE FROM tail WHERE row >= ? AND row < ? AND stream IN ({marks})",  # noqa: S608  # only question marks
                (row, row + _SWEEP_ROWS, *dead),
            )
        self._sweep = _Sweep(dead, row + _SWEEP_ROWS, last) if row + _SWEEP_ROWS <= last else None
        return self._sweep is not None or bool(self._dead)

    def forget(self, stream_ids: Sequence[str], *, most_expired: int) -> None:
        """Replace streams by tombstones. Only the newest `most_expired` tombstones are kept."""
        ids = [(stream_id,) for stream_id in stream_ids]
        with self._writing() as connection:
            connection.executemany(
                "INSERT OR IGNORE INTO expired (stream_id, owner)"
                " SELECT stream_id, owner FROM streams WHERE stream_id = ?",
                ids,
            )
            connection.executemany("DELETE FROM streams WHERE stream_id = ?", ids)
            connection.execute("DELETE FROM expired WHERE row <= (SELECT max(row) FROM expired) - ?", (most_expired,))

    def count_recovery(self) -> None:
        """Count a recovery of each unfinished stream. The count restarts when a stream has got new events."""
        with self._writing() as connection:
            connection.execute(
                "UPDATE streams SET recoveries = 0 WHERE number IN"
                " (SELECT stream FROM tail WHERE row > (SELECT value FROM facts WHERE name = 'recovered'))"
            )
            connection.execute("UPDATE streams SET recoveries = recoveries + 1 WHERE finished IS NULL")
            connection.execute("INSERT OR REPLACE INTO facts VALUES ('recovered', ?)", (self._num_rows,))

    def finished(self) -> Iterator[tuple[str, bytes | None, int, str]]:
        """Yield id, record (None if damaged), size in bytes and time of the end of all finished streams, oldest
        first."""
        query = (
            "SELECT stream_id, record, record_crc, length(record) + length(events), finished FROM streams"
            " WHERE finished IS NOT NULL ORDER BY rowid"
        )
        for stream_id, record, crc, num_bytes, finished in self._select(query):
            yield stream_id, intact(record, crc, stream_id), num_bytes or 0, finished

    def load(self, stream_id: str) -> tuple[bytes, bytes] | None:
        """Return record and events of a finished stream; None if it is missing or damaged."""
        query = "SELECT number, record, record_crc, events, events_crc FROM streams WHERE stream_id = ?"
        row = next(self._select(query, stream_id), None)
        if row is None:
            return None
        number, record, record_crc, events, events_crc = row
        record, events = intact(record, record_crc, stream_id), intact(events, events_crc, number)
        return (record, events) if record is not None and events is not None else None

    def unfinished(self) -> list[tuple[int, str, bytes | None, int]]:
        """Return number, id, record (None if damaged) and count of recoveries of the streams that have not ended."""
        query = (
            "SELECT number, stream_id, record, record_crc, recoveries FROM streams"
            " WHERE finished IS NULL ORDER BY number"
        )
        return [
            (number, stream_id, intact(record, crc, stream_id), recoveries)
            for number, stream_id, record, crc, recoveries in self._select(query)
        ]

    def tail(self) -> Iterator[TailRow]:
        """Yield all rows of the tail in the order in which they were written."""
        query = "SELECT stream, seq, events, crc FROM tail ORDER BY row"
        for stream, seq, events, crc in self._select(query):
            yield TailRow(stream, seq, intact(events, crc, stream, seq))

    def expired(self) -> list[tuple[str, str]]:
        """Return (stream id, owner) of the tombstones, oldest first."""
        return [*self._select("SELECT stream_id, owner FROM expired ORDER BY row")]

    def add_notes(self, notes: Iterable[tuple[bytes, bytes]]) -> None:
        """Write notes of an extension, given as (row key, body)."""
        with self._writing() as connection:
            _insert_notes(connection, notes)

    def change_notes(self, notes: Iterable[tuple[bytes, bytes]], erased: Iterable[bytes]) -> None:
        """Delete all notes with the row keys of `notes` and with those of `erased`, and write `notes`: all or none."""
        notes = list(notes)
        with self._writing() as connection:
            keys = [(key,) for key in (*(key for key, _ in notes), *erased)]
            connection.executemany("DELETE FROM notes WHERE key = ?", keys)
            _insert_notes(connection, notes)

    def erase_notes(self, keys: Iterable[bytes]) -> None:
        """Delete all notes with these row keys."""
        with self._writing() as connection:
            connection.executemany("DELETE FROM notes WHERE key = ?", [(key,) for key in keys])

    def notes(self, first: bytes, end: bytes) -> Iterator[tuple[int, object, bytes | None]]:
        """Yield row, key and body (None if damaged) of the notes with row keys from `first` to before `end`, in the
        order of writing; with `end` before `first`, of those that are not between them. Also yield those with a damaged
        row key, which is not bytes."""
        query = f"SELECT row, key, body, crc FROM notes WHERE row IN ({_rows_within(first, end)}) ORDER BY row"  # noqa: S608
        for row, key, body, crc in self._select(query, first, end):
            yield row, key, intact(body, crc, key) if isinstance(key, bytes) else None

    def note_sizes(self, first: bytes, end: bytes, most: int) -> list[tuple[bytes, int, bytes]]:
        """Return the row keys of at most `most` notes (-1: all) from `first` to before `end` in their order, each with
        the size of the body and its first byte."""
        query = (
            "SELECT key, length(body), substr(body, 1, 1) FROM notes WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"
        )
        return list(self._select(query, first, end, most))

    def drop_notes(self, rows: Sequence[int]) -> None:
        with self._writing() as connection:
            connection.executemany("DELETE FROM notes WHERE row = ?", [(row,) for row in rows])

    def cut_notes(self, cuts: Mapping[bytes, int]) -> None:
        """Delete the notes of each row key from a row on. `cuts` maps row keys to rows."""
        with self._writing() as connection:
            connection.executemany("DELETE FROM notes WHERE key = ? AND row >= ?", cuts.items())

    def vacuum(self, num_pages: int) -> bool:
        """Return some unused pages to the file system. Returns whether there are more."""
        try:
            # `execute` would only take the first step, which frees one page.
            self._connection.executescript(f"PRAGMA incremental_vacuum({num_pages})")
            (num_unused,) = self._connection.execute("PRAGMA freelist_count").fetchone()
            return bool(num_unused)
        except sqlite3.Error as error:
            raise as_storage_error(error) from error

    def checkpoint(self, *, truncate: bool = False) -> None:
        """Move the rest of the write-ahead log into the database. The next commit then starts at the beginning of the
        log file; with `truncate` the file is emptied now. Never waits, since it runs between two commits of the only
        writer."""
        try:
            self._connection.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if truncate else 'PASSIVE'})").fetchall()
        except sqlite3.Error as error:
            raise as_storage_error(error) from error

    def probe(self) -> None:
        """Write something, to test that the disk takes it. Raises: StorageError."""
        with self._writing() as connection:
            connection.execute("INSERT OR REPLACE INTO facts VALUES ('probe', randomblob(8192))")

    def close(self) -> None:
        self._connection.close()
        self.reserve.free()
        os.close(self._lock)


def _rows_within(first: bytes, end: bytes) -> str:
    """Return a query for the rows of `Database.notes`. All bytes are greater than any other value."""
    if first < end:
        return "SELECT row FROM notes WHERE key >= ? AND key < ? UNION ALL SELECT row FROM notes WHERE key < x''"
    return "SELECT row FROM notes WHERE key >= ? OR key < ?"


def _insert_notes(connection: sqlite3.Connection, notes: Iterable[tuple[bytes, bytes]]) -> None:
    connection.executemany(
        "INSERT INTO notes (key, body, crc) VALUES (?, ?, ?)",
        [(key, body, checksum(body, key)) for key, body in notes],
    )
