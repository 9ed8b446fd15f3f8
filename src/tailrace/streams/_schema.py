"""The tables of the journal, and the migrations from older versions."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from tailrace.errors import ModelError

__all__ = ["DATA_DIR_HINT", "migrate"]

DATA_DIR_HINT = "Choose another directory with --data-dir, or keep nothing on disk with --journal memory."

# What each version of the schema adds to the previous one. Never change an entry; append new ones.
_MIGRATIONS = (
    """
    CREATE TABLE streams (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        stream_id TEXT NOT NULL UNIQUE,
        record BLOB NOT NULL,
        record_crc INTEGER NOT NULL,
        recoveries INTEGER NOT NULL DEFAULT 0,
        events BLOB,
        events_crc INTEGER,
        finished TEXT
    );
    CREATE TABLE tail (
        row INTEGER PRIMARY KEY,
        stream INTEGER NOT NULL,
        seq INTEGER NOT NULL,
        events BLOB NOT NULL,
        crc INTEGER NOT NULL
    );
    CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
    CREATE TABLE expired (row INTEGER PRIMARY KEY AUTOINCREMENT, stream_id TEXT NOT NULL UNIQUE);
    """,
    """
    CREATE TABLE notes (row INTEGER PRIMARY KEY, key BLOB NOT NULL, body BLOB NOT NULL, crc INTEGER NOT NULL);
    CREATE INDEX notes_by_key ON notes (key);
    """,
    """
    ALTER TABLE streams ADD COLUMN owner TEXT NOT NULL DEFAULT 'anonymous';
    ALTER TABLE expired ADD COLUMN owner TEXT NOT NULL DEFAULT 'anonymous';
    """,
    # Events may hold reasoning, which versions before this one would take for damage.
    "",
    # Prompts may hold other segments than token ids, likewise.
    "",
)


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Migrate the tables to the newest version, and check that the file is not damaged.

    Raises: ModelError for a journal of a newer version, sqlite3.DatabaseError for a damaged one.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(_MIGRATIONS):
        raise ModelError(f"The journal {path} was written by a newer version of tailrace. {DATA_DIR_HINT}")
    for number, script in enumerate(_MIGRATIONS[version:], version + 1):
        connection.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;")
    if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok" or _tables(connection) != _expected_tables():
        raise sqlite3.DatabaseError("malformed")


def _tables(connection: sqlite3.Connection) -> list[tuple[object, ...]]:
    return connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name").fetchall()


def _expected_tables() -> list[tuple[object, ...]]:
    """Return the tables of a new file. SQLite itself does not notice a damaged schema."""
    with contextlib.closing(sqlite3.connect(":memory:")) as new:
        for script in _MIGRATIONS:
            new.executescript(script)
        return _tables(new)
