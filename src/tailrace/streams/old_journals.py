"""The journals that servers have left in the user's data directory, one for each port or app; and their removal."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["KeptJournal", "find_journals", "remove_expired_journals"]

_FILES = ("journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm", "journal.reserve", "journal.lock")
LONGEST_LINGER_S = (
    86_400.0  # how long an unfinished stream can wait for a reader; then it ends and its retention begins
)


@dataclass(frozen=True, slots=True)
class KeptJournal:
    """A journal's directory."""

    path: Path
    num_bytes: int
    idle_s: float  # since it was last written
    is_held: bool  # by a server that runs


def find_journals(data_path: Path) -> list[KeptJournal]:
    """All journals directly below a data directory, by name."""
    directories = sorted(path.parent for path in data_path.glob("*/journal.sqlite"))
    return [found for directory in directories if (found := _look_at(directory)) is not None]


def remove_expired_journals(data_path: Path, *, retention_s: float, keep: Path) -> list[Path]:
    """Remove journals in which every stream has expired; returns their directories.

    Kept are `keep`, what a server holds, what was written within a day and `retention_s`, what has durable streams
    (they need not expire), and every file that is not a journal's. The retention of the server that left a journal is
    not known; this server's counts. What cannot be removed stays.
    """
    removed = []
    for journal in find_journals(data_path):
        if journal.path == keep or journal.is_held or journal.idle_s < LONGEST_LINGER_S + retention_s:
            continue
        with suppress(OSError, sqlite3.Error), _held(journal.path):
            if _has_durable_streams(journal.path / "journal.sqlite"):
                continue
            for name in _FILES:
                (journal.path / name).unlink(missing_ok=True)
            removed.append(journal.path)
            journal.path.rmdir()  # not where something else is in it
    return removed


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
    lock = os.open(directory / "journal.lock", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _has_durable_streams(path: Path) -> bool:
    """Raises: sqlite3.Error if it cannot be read."""
    with closing(sqlite3.connect(path)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        return "notes" in tables and connection.execute("SELECT 1 FROM notes LIMIT 1").fetchone() is not None
