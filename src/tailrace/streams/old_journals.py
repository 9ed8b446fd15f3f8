"""The journals that servers have left in the user's data directory, one for each port or app; and their removal."""

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

from tailrace.streams._database import DAMAGED_FACT
from tailrace.streams._files import is_at

__all__ = [
    "LIFETIME_FACT", "KeptJournal", "find_journals", "lifetime_s", "remove_expired_journals", "remove_unused_journal",
]  # fmt: skip

LIFETIME_FACT = "lifetime_s"  # the name under which a journal keeps what `lifetime_s` returned

_FILES = ("journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm", "journal.reserve", "journal.lock")
_LONGEST_LINGER_S = 86_400.0  # that a request can ask for


@dataclass(frozen=True, slots=True)
class KeptJournal:
    """A journal's directory."""

    path: Path
    num_bytes: int
    idle_s: float  # since it was last written
    is_held: bool  # by a server that runs


def lifetime_s(*, linger_s: float, retention_s: float) -> float:
    """How long after the last write to a journal its streams can still be asked for, with a server's settings: an
    unfinished stream waits for a reader that long, and its retention begins when it has ended."""
    return max(linger_s, _LONGEST_LINGER_S) + retention_s


def find_journals(data_path: Path) -> list[KeptJournal]:
    """All journals directly below a data directory, by name."""
    directories = sorted(path.parent for path in data_path.glob("*/journal.sqlite"))
    return [found for directory in directories if (found := _look_at(directory)) is not None]


def remove_expired_journals(data_path: Path, *, lifetime_s: float, keep: Path) -> list[Path]:
    """Remove journals in which every stream has expired; returns their directories.

    A journal's streams have expired when its last write is longer ago than both this server's `lifetime_s` and that of
    the server that left it. Kept are `keep`, what a server holds, what does not say its lifetime, what has durable
    streams (they need not expire), and every file that is not a journal's. What cannot be removed stays.
    """
    removed = []
    for journal in find_journals(data_path):
        if journal.path == keep or journal.is_held or journal.idle_s < lifetime_s:
            continue
        with suppress(OSError, sqlite3.Error), _held(journal.path):
            if not _has_expired(journal.path / "journal.sqlite", journal.idle_s):
                continue
            for name in _FILES:
                (journal.path / name).unlink(missing_ok=True)
            removed.append(journal.path)
            journal.path.rmdir()  # not where something else is in it
    return removed


def remove_unused_journal(directory: Path) -> None:
    """Remove a journal into which no stream was ever written. One that a server holds, that cannot be read, that lost
    streams to damage, or that has another file beside it, such as a damaged predecessor, stays."""
    with suppress(OSError, sqlite3.Error), _held(directory):
        if any(path.name not in _FILES for path in directory.iterdir()):
            return
        with _reading(directory / "journal.sqlite") as connection:
            rows = "SELECT 1 FROM streams UNION ALL SELECT 1 FROM expired UNION ALL SELECT 1 FROM notes"
            facts = "SELECT 1 FROM facts WHERE name = ?"
            if connection.execute(f"{rows} UNION ALL {facts} LIMIT 1", (DAMAGED_FACT,)).fetchone() is not None:
                return
        for name in _FILES:
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()


def _look_at(directory: Path) -> KeptJournal | None:
    files = [directory / name for name in _FILES]
    try:
        facts = [path.stat() for path in files if path.exists()]
        written_s = max((directory / name).stat().st_mtime for name in _FILES[:2] if (directory / name).exists())
    except (OSError, ValueError):
        return None  # it was removed meanwhile
    num_bytes = sum(fact.st_blocks * 512 for fact in facts)
    return KeptJournal(directory, num_bytes, max(0.0, time.time() - written_s), is_held=_is_held(directory))


def _is_held(directory: Path) -> bool:
    try:
        with _held(directory):
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


@contextmanager
def _held(directory: Path) -> Iterator[None]:
    """Hold a journal's lock, as its server does.

    Raises: BlockingIOError if a server has it, OSError if there is none.
    """
    path = directory / "journal.lock"
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_at(lock, path):
            raise FileNotFoundError(errno.ENOENT, "it was removed meanwhile", str(path))
        yield
    finally:
        os.close(lock)


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A journal that is only looked at. A connection that may write would, when it is closed, move what the write-ahead
    log has into the file. That renews the time of the last write, and the journal's own server could no longer see that
    the end of the log was lost. Raises: sqlite3.Error if it cannot be read."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        yield connection


def _has_expired(path: Path, idle_s: float) -> bool:
    """Whether no stream of a journal can be asked for any more. Raises: sqlite3.Error if it cannot be read."""
    with _reading(path) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        if not {"facts", "notes"} <= tables or connection.execute("SELECT 1 FROM notes LIMIT 1").fetchone() is not None:
            return False
        row = connection.execute("SELECT value FROM facts WHERE name = ?", (LIFETIME_FACT,)).fetchone()
    try:
        return row is not None and idle_s >= float(row[0])
    except (TypeError, ValueError):
        return False  # the fact is damaged
