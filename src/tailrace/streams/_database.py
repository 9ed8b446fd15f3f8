"""The journal's file: an SQLite database in WAL mode, written by one process through one connection.

Events of running streams are appended to the table `tail`, a row for what one stream got in one turn, so that a commit
touches one page or two. When a stream has ended they are moved into one row of `streams`. Every row that matters has a
checksum, over what says whose it is as well: a row that was moved or changed is as good as none.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from tailrace.errors import ModelError, StorageError
from tailrace.streams._clock import age_s, stamp
from tailrace.streams._files import has_lost_commits, hold_lock, open_own
from tailrace.streams._rows import checksum, intact
from tailrace.streams._schema import OTHERWISE, migrate
from tailrace.streams._troubles import as_storage_error, is_damage, journal_full
from tailrace.types import ANONYMOUS

__all__ = ["DAMAGED_FACT", "Database", "FinishedRow", "TailRow"]

_LOCK_MS = 50
_WAL_BYTES = 16 * 2**20  # of the write-ahead log's file that are kept when it begins anew
_SWEEP_ROWS = 4_000  # at once: a few milliseconds
_SWEEP_STREAMS = 500
_INSERT, _ROW = "INSERT INTO tail (row, stream, seq, events, crc) VALUES ", "(?, ?, ?, ?, ?)"
_ROWS_AT_ONCE = 128  # older builds of SQLite take 999 values in a statement
DAMAGED_FACT = "damaged"  # when streams were lost
RESERVE_BYTES = 2**20  # given back when the disk is full, so that streams can still be ended


class TailRow(NamedTuple):
    """Events of a running stream: the first has number `seq`. None where they are not what was written."""

    stream: int
    seq: int
    events: bytes | None


class FinishedRow(NamedTuple):
    """A finished stream."""

    number: int
    stream_id: str
    record: bytes
    events: bytes
    finished: str  # when


class _Sweep(NamedTuple):
    """A pass over the tail, which goes from `row` to `last`."""

    dead: list[int]
    row: int
    last: int


class Database:
    """Raises StorageError, and JournalFull where room is short, from whatever writes. With `erases` what is deleted is
    overwritten, too.

    Raises: ModelError if the file cannot be opened at all: it is another server's, a newer version's, or no place to
    write to.
    """

    def __init__(self, directory: Path, *, erases: bool = False) -> None:
        self.path = directory / "journal.sqlite"
        self._erases = erases
        self._reserve = directory / "journal.reserve"
        try:
            self._lock = hold_lock(directory / "journal.lock")
        except BlockingIOError:
            raise ModelError(f"Another server keeps its journal in {directory}. {OTHERWISE}") from None
        except OSError as error:
            raise ModelError(f"The journal cannot be kept in {directory}: {error.strerror}. {OTHERWISE}") from None
        self.is_cut = False  # the end of the write-ahead log was damaged, and is lost
        self._num_rows = 0  # ever, in the tail
        self._dead: set[int] = set()  # streams whose rows of the tail nobody needs
        self._sweep: _Sweep | None = None
        try:
            self.set_aside = self._open()
            self.be_patient(True)
            if self.is_cut or self.set_aside is not None:
                self.keep_damage()
            with self._writing() as connection:
                connection.execute(
                    "DELETE FROM tail WHERE stream NOT IN (SELECT number FROM streams WHERE finished IS NULL)"
                )
            (self._num_rows,) = self._connection.execute("SELECT coalesce(max(row), 0) FROM tail").fetchone()
        except StorageError as error:
            self._connection.close()
            os.close(self._lock)
            raise ModelError(f"The journal cannot be kept in {directory}: {error.message} {OTHERWISE}") from None
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self) -> Path | None:
        """Open the file; one that is no longer readable is set aside, and a new one begun. Returns where it went."""
        try:
            self._connection = self._first()
            return None
        except OSError as error:
            raise ModelError(f"The journal {self.path} cannot be opened: {error.strerror}. {OTHERWISE}") from None
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise ModelError(f"The journal {self.path} cannot be opened: {error}. {OTHERWISE}") from None
        except UnicodeDecodeError:
            pass  # the name of a table was damaged, and what SQLite says about it cannot be read
        aside = self.path.with_name(f"journal.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S}.sqlite")
        self.path.rename(aside)
        for suffix in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                self.path.with_name(self.path.name + suffix).rename(aside.with_name(aside.name + suffix))
        self._connection = self._first()
        return aside

    def _first(self) -> sqlite3.Connection:
        """The first connection, to a file that is there and whole."""
        # Made here, since SQLite lets others read what it makes; its further files are like this one. Never while it
        # is open: closing any descriptor of a file gives up all the locks that a process has on it.
        os.close(open_own(self.path, os.O_RDWR))
        connection = self.connect(is_first=True)
        try:
            migrate(connection, self.path)
        except BaseException:
            connection.close()
            raise
        return connection

    def connect(self, *, is_first: bool = False) -> sqlite3.Connection:
        """A connection; the second one is for checkpoints, in a thread of their own."""
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        connection.text_factory = lambda text: text.decode("utf-8", "replace")  # what is damaged is found by checksums
        try:
            if is_first:  # and nothing is written yet, which would be over what is lost
                _, num_read, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                self.is_cut = has_lost_commits(self.path.with_name(self.path.name + "-wal"), max(num_read, 0))
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

    def be_patient(self, patient: bool) -> None:
        """Whether writing waits a moment for a lock. Not where it has been in vain: there are streams to serve."""
        self._connection.execute(f"PRAGMA busy_timeout = {_LOCK_MS if patient else 0}")

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, of which all is kept or nothing."""
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

    def _select(self, query: str, *values: object) -> Iterator[Any]:  # Any: rows, each as its query has it
        try:
            yield from self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise as_storage_error(error) from error

    def fact(self, name: str) -> bytes | None:
        """What is kept under a name."""
        row = next(self._select("SELECT value FROM facts WHERE name = ?", name), None)
        return row[0] if row is not None else None

    def keep_fact(self, name: str, value: bytes) -> None:
        with self._writing() as connection:
            connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def keep_damage(self) -> None:
        """Note that streams were lost just now, nobody knows which."""
        self.keep_fact(DAMAGED_FACT, stamp().encode())

    def damage_age_s(self) -> float | None:
        """Seconds since streams were lost because the file was damaged; None if that is not known to have been."""
        try:
            kept = self.fact(DAMAGED_FACT)
            return None if kept is None else age_s(kept.decode())
        except (AttributeError, UnicodeDecodeError, ValueError):  # the fact may be damaged, too
            return None

    def begin(self, stream_id: str, record: bytes, owner: str = ANONYMOUS) -> int:
        """Keep a new stream; returns its number."""
        with self._writing() as connection:
            cursor = connection.execute(
                "INSERT INTO streams (stream_id, record, record_crc, owner) VALUES (?, ?, ?, ?)",
                (stream_id, record, checksum(record, stream_id), owner),
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def append(self, rows: Sequence[TailRow]) -> None:
        """One statement, as a rule, which is a transaction by itself: BEGIN and COMMIT take a third as long again."""
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
        """Put finished streams into a row each; their rows of the tail are dead from then on."""
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
        """Keep of finished streams, given as (number, id), nothing but that they were there."""
        self.forget([stream_id for _, stream_id in streams], most_expired=most_expired)
        self._dead.update(number for number, _ in streams)

    def sweep(self) -> bool:
        """Take some dead rows off the tail; whether there are more.

        The rows of streams that ran together lie side by side, so they are passed once for all that have died by then.
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
                f"DELETE FROM tail WHERE row >= ? AND row < ? AND stream IN ({marks})",  # noqa: S608  # question marks
                (row, row + _SWEEP_ROWS, *dead),
            )
        self._sweep = _Sweep(dead, row + _SWEEP_ROWS, last) if row + _SWEEP_ROWS <= last else None
        return self._sweep is not None or bool(self._dead)

    def forget(self, stream_ids: Sequence[str], *, most_expired: int) -> None:
        """Keep of these only that they were there, and that of the last `most_expired`."""
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
        """Note that the unfinished streams are about to be taken up: the how many-th time since they last got on."""
        with self._writing() as connection:
            connection.execute(
                "UPDATE streams SET recoveries = 0 WHERE number IN"
                " (SELECT stream FROM tail WHERE row > (SELECT value FROM facts WHERE name = 'recovered'))"
            )
            connection.execute("UPDATE streams SET recoveries = recoveries + 1 WHERE finished IS NULL")
            connection.execute("INSERT OR REPLACE INTO facts VALUES ('recovered', ?)", (self._num_rows,))

    def finished(self) -> Iterator[tuple[str, bytes | None, int, str]]:
        """Id, record (None where it is damaged), bytes and end of all finished streams, oldest first."""
        query = (
            "SELECT stream_id, record, record_crc, length(record) + length(events), finished FROM streams"
            " WHERE finished IS NOT NULL ORDER BY rowid"
        )
        for stream_id, record, crc, num_bytes, finished in self._select(query):
            yield stream_id, intact(record, crc, stream_id), num_bytes or 0, finished

    def load(self, stream_id: str) -> tuple[bytes, bytes] | None:
        """Record and events of a finished stream; None where they are not, or not any more, what was written."""
        query = "SELECT number, record, record_crc, events, events_crc FROM streams WHERE stream_id = ?"
        row = next(self._select(query, stream_id), None)
        if row is None:
            return None
        number, record, record_crc, events, events_crc = row
        record, events = intact(record, record_crc, stream_id), intact(events, events_crc, number)
        return (record, events) if record is not None and events is not None else None

    def unfinished(self) -> list[tuple[int, str, bytes | None, int]]:
        """Number, id, record (None where it is damaged) and recoveries of streams without an end."""
        query = (
            "SELECT number, stream_id, record, record_crc, recoveries FROM streams"
            " WHERE finished IS NULL ORDER BY number"
        )
        return [
            (number, stream_id, intact(record, crc, stream_id), recoveries)
            for number, stream_id, record, crc, recoveries in self._select(query)
        ]

    def tail(self) -> Iterator[TailRow]:
        """All rows of the tail, in the order of writing."""
        query = "SELECT stream, seq, events, crc FROM tail ORDER BY row"
        for stream, seq, events, crc in self._select(query):
            yield TailRow(stream, seq, intact(events, crc, stream, seq))

    def expired(self) -> list[tuple[str, str]]:
        """Ids of streams that are no longer kept, and whose they were, oldest first."""
        return [*self._select("SELECT stream_id, owner FROM expired ORDER BY row")]

    def note(self, key: bytes, body: bytes) -> None:
        """Keep a record of a durable stream."""
        with self._writing() as connection:
            connection.execute("INSERT INTO notes (key, body, crc) VALUES (?, ?, ?)", (key, body, checksum(body, key)))

    def erase(self, key: bytes) -> None:
        """Forget all records of a durable stream."""
        with self._writing() as connection:
            connection.execute("DELETE FROM notes WHERE key = ?", (key,))

    def notes(self) -> Iterator[tuple[int, bytes, bytes | None]]:
        """All records of durable streams with their rows, in the order of writing; None where they are not what was
        written."""
        for row, key, body, crc in self._select("SELECT row, key, body, crc FROM notes ORDER BY row"):
            yield row, key, intact(body, crc, key) if isinstance(key, bytes) else None

    def cut_notes(self, cuts: Mapping[bytes, int]) -> None:
        """Forget the records of durable streams from a row on, given by key."""
        with self._writing() as connection:
            connection.executemany("DELETE FROM notes WHERE key = ? AND row >= ?", cuts.items())

    def give_room_back(self, num_pages: int) -> bool:
        """Return some unused pages to the file system; whether there are more."""
        try:
            # Not `execute`: it takes the first step only, which is one page.
            self._connection.executescript(f"PRAGMA incremental_vacuum({num_pages})")
            (num_unused,) = self._connection.execute("PRAGMA freelist_count").fetchone()
            return bool(num_unused)
        except sqlite3.Error as error:
            raise as_storage_error(error) from error

    def checkpoint(self, *, truncate: bool = False) -> None:
        """Move what is left of the write-ahead log into the database. Between two commits of the only writer there is
        nobody to wait for, and the log begins anew with the next one; or is empty at once."""
        try:
            self._connection.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if truncate else 'PASSIVE'})").fetchall()
        except sqlite3.Error as error:
            raise as_storage_error(error) from error

    def hold_reserve(self) -> None:
        """Set some of the disk aside for hard times. Raises: StorageError if it has none."""
        try:
            descriptor = open_own(self._reserve, os.O_WRONLY)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EPERM, errno.EISDIR, errno.ENXIO):
                raise StorageError("The file journal.reserve is not a plain file of this user's.") from error
            self.use_reserve()
            raise journal_full() from error

    def use_reserve(self) -> None:
        with suppress(OSError):
            self._reserve.unlink(missing_ok=True)

    def probe(self) -> None:
        """Whether something can be written. Raises: StorageError."""
        with self._writing() as connection:
            connection.execute("INSERT OR REPLACE INTO facts VALUES ('probe', randomblob(8192))")

    def close(self) -> None:
        self._connection.close()
        self.use_reserve()
        os.close(self._lock)
