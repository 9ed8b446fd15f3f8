"""Find and remove the journals of earlier servers in the user's data directory: one for each port or app."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tailrace.streams._database import DAMAGED_PROPERTY
from tailrace.streams._files import is_at

__all__ = [
    "LIFETIME_PROPERTY", "KeptJournal", "find_journals", "lifetime_s", "remove_expired_journals",
    "remove_unused_journal",
]  # fmt: skip

LIFETIME_PROPERTY = "lifetime_s"  # the name under which a journal stores the result of `lifetime_s`

_FILES = ("journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm", "journal.reserve", "journal.lock")
_LONGEST_LINGER_S = 86_400.0  # the largest linger_s of a request


@dataclass(frozen=True, slots=True)
class KeptJournal:
    """A journal's directory."""

    path: Path
    num_bytes: int
    idle_s: float  # since it was last written
    is_held: bool  # locked by a running server


def lifetime_s(*, linger_s: float, retention_s: float) -> float:
    """Return how long after its last write a journal can have streams that a client may read, given the server's
    settings: an unfinished stream lingers first, and its retention starts when it has ended."""
    return max(linger_s, _LONGEST_LINGER_S) + retention_s


def find_journals(data_path: Path) -> list[KeptJournal]:
    """Return all journals directly below a data directory, sorted by name."""
    directories = sorted(path.parent for path in data_path.glob("*/journal.sqlite"))
    return [found for directory in directories if (found := _inspect(directory)) is not None]


def remove_expired_journals(data_path: Path, *, lifetime_s: float, keep: Path) -> list[Path]:
    """Remove journals in which all streams have expired. Returns their directories.

    All streams have expired when the last write is older than this server's `lifetime_s` and than the lifetime that the
    journal states. Not removed: the directory `keep`, journals that a server has locked, journals without a lifetime,
    journals with notes of extensions (which need not expire), and files that are not part of a journal. Errors are
    ignored.
    """
    removed = []
    for journal in find_journals(data_path):
        if journal.path == keep or journal.is_held or journal.idle_s < lifetime_s:
            continue
        with suppress(OSError, sqlite3.Error), _locked(journal.path):
            if not _has_expired(journal.path / "journal.sqlite", journal.idle_s):
                continue
            for name in _FILES:
                (journal.path / name).unlink(missing_ok=True)
            removed.append(journal.path)
            journal.path.rmdir()  # fails if the directory has other files
    return removed


def remove_unused_journal(directory: Path) -> None:
    """Remove a journal that never had a stream. Does nothing if a server has locked it, it cannot be read, it lost
    streams by damage, or its directory has other files, such as an earlier damaged journal."""
    with suppress(OSError, sqlite3.Error), _locked(directory):
        if any(path.name not in _FILES for path in directory.iterdir()):
            return
        with _reading(directory / "journal.sqlite") as connection:
            rows = "SELECT 1 FROM streams UNION ALL SELECT 1 FROM expired UNION ALL SELECT 1 FROM notes"
            damaged = "SELECT 1 FROM facts WHERE name = ?"
            if connection.execute(f"{rows} UNION ALL {damaged} LIMIT 1", (DAMAGED_PROPERTY,)).fetchone() is not None:
                return
        for name in _FILES:
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()


def _inspect(directory: Path) -> KeptJournal | None:
    files = [directory / name for name in _FILES]
    try:
        stats = [path.stat() for path in files if path.exists()]
        written_s = max((directory / name).stat().st_mtime for name in _FILES[:2] if (directory / name).exists())
    except (OSError, ValueError):
        return None  # another process has just removed it
    num_bytes = sum(one.st_blocks * 512 for one in stats)
    return KeptJournal(directory, num_bytes, max(0.0, time.time() - written_s), is_held=_is_locked(directory))


def _is_locked(directory: Path) -> bool:
    try:
        with _locked(directory):
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a journal's lock, as a server does.

    Raises: BlockingIOError if a server has it, OSError if there is no lock file.
    """
    path = directory / "journal.lock"
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_at(lock, path):
            raise FileNotFoundError(errno.ENOENT, "another process has just removed it", str(path))
        yield
    finally:
        os.close(lock)


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a journal for reading only. Raises: sqlite3.Error if it cannot be read.

    A connection that may write would run a checkpoint when it is closed. That would change the time of the last write,
    and hide from the journal's server that the end of the log was lost.
    """
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        yield connection


def _has_expired(path: Path, idle_s: float) -> bool:
    """Return whether all streams of a journal have expired. Raises: sqlite3.Error if it cannot be read."""
    with _reading(path) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        if not {"facts", "notes"} <= tables or connection.execute("SELECT 1 FROM notes LIMIT 1").fetchone() is not None:
            return False
        row = connection.execute("SELECT value FROM facts WHERE name = ?", (LIFETIME_PROPERTY,)).fetchone()
    try:
        return row is not None and idle_s >= float(row[0])
    except (TypeError, ValueError):
        return False  # the value is damaged
