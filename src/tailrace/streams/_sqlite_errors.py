"""Translate SQLite's errors."""

from __future__ import annotations

import sqlite3

from tailrace.errors import JournalDamaged, JournalFull, StorageError

__all__ = ["as_storage_error", "is_damage", "journal_full"]


def journal_full() -> JournalFull:
    return JournalFull("The disk of this server's journal is full.")


def is_damage(error: sqlite3.DatabaseError) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is None or code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def as_storage_error(error: sqlite3.Error) -> StorageError:
    """Translate an error of SQLite. SQLite's own message is not sent to clients."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return journal_full()
    if isinstance(error, sqlite3.DatabaseError) and is_damage(error):
        return JournalDamaged("The journal of this server is damaged.")
    is_locked = code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    reason = "is locked by another program" if is_locked else "cannot be written"
    return StorageError(f"The journal of this server {reason}.")
