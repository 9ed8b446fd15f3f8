"""The journal's file alone."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tailrace.errors import StorageError
from tailrace.streams._database import Database, TailRow


@pytest.mark.parametrize("count", [1, 2, 128, 129, 700])
def test_appends_are_atomic(tmp_path: Path, count: int) -> None:
    def num_rows() -> int:
        with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as other:
            return int(other.execute("SELECT count(*) FROM tail").fetchone()[0])

    database = Database(tmp_path)
    with closing(database):
        rows = [TailRow(database.begin(f"stream-{number}", b"record"), 1, b"event") for number in range(count)]
        database.append(rows)
        assert num_rows() == count
        database.set_lock_wait(False)
        with closing(sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StorageError):
                database.append(rows)
            other.execute("ROLLBACK")
        database._connection.execute("PRAGMA max_page_count = 1")  # no larger than it is
        with pytest.raises(StorageError):
            database.append([*rows, TailRow(1, 2, b"x" * 2**20)])
        database._connection.execute("PRAGMA max_page_count = 1000000")
        assert num_rows() == count
        database.append([TailRow(row.stream, 2, b"another") for row in rows])
        assert num_rows() == 2 * count
    again = Database(tmp_path)
    with closing(again):
        assert num_rows() == 2 * count
