"""Which journals of other servers are removed, and which are kept."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tailrace.errors import ModelError
from tailrace.streams._clock import stamp
from tailrace.streams._files import hold_lock
from tailrace.streams.disk import DiskJournal
from tailrace.streams.old_journals import find_journals, lifetime_s, remove_expired_journals, remove_unused_journal

LIFETIME_S = lifetime_s(linger_s=60.0, retention_s=900.0)
OLD_S = LIFETIME_S + 60


def _leave(directory: Path, idle_s: float = OLD_S, lifetime_s: float | None = LIFETIME_S) -> Path:
    """Write the journal of a server that has ended, with this age."""
    DiskJournal(directory, lifetime_s=lifetime_s).close()
    _set_idle(directory, idle_s)
    return directory


def _set_idle(directory: Path, idle_s: float) -> None:
    for path in directory.iterdir():
        os.utime(path, (time.time() - idle_s,) * 2)


def _remove(data: Path, keep: Path, lifetime_s: float = LIFETIME_S) -> list[str]:
    return [path.name for path in remove_expired_journals(data, lifetime_s=lifetime_s, keep=keep)]


def test_expired_journals_are_removed_and_others_kept(tmp_path: Path) -> None:
    own = _leave(tmp_path / "port-8000")
    gone = _leave(tmp_path / "port-8001")
    app = _leave(tmp_path / "app-bot-0a1b2c3d-port-8000")
    recent = _leave(tmp_path / "port-8002", OLD_S - 600)
    other = tmp_path / "certificates"
    other.mkdir()
    assert _remove(tmp_path, own) == [app.name, gone.name]
    assert {path.name for path in tmp_path.iterdir()} == {own.name, recent.name, other.name}
    assert _remove(tmp_path, own) == []


def test_the_longer_of_both_lifetimes_counts(tmp_path: Path) -> None:
    month_s = lifetime_s(linger_s=60.0, retention_s=30 * 86_400.0)
    kept = _leave(tmp_path / "port-8001", lifetime_s=month_s)
    assert _remove(tmp_path, tmp_path / "port-8000") == []
    _set_idle(kept, month_s + 60)
    assert _remove(tmp_path, tmp_path / "port-8000", lifetime_s=2 * month_s) == []
    assert _remove(tmp_path, tmp_path / "port-8000") == [kept.name]


def test_a_lifetime_covers_the_longest_wait_for_a_reader() -> None:
    assert lifetime_s(linger_s=60.0, retention_s=900.0) == 86_400.0 + 900.0
    assert lifetime_s(linger_s=200_000.0, retention_s=900.0) == 200_900.0


@pytest.mark.parametrize("fact", [None, b"?", b"nan", b"\xff"])
def test_a_journal_without_a_lifetime_is_kept(tmp_path: Path, fact: bytes | None) -> None:
    kept = _leave(tmp_path / "port-8001", lifetime_s=None)
    if fact is not None:
        with closing(sqlite3.connect(kept / "journal.sqlite")) as connection:
            connection.execute("INSERT INTO facts VALUES ('lifetime_s', ?)", (fact,))
            connection.commit()
        _set_idle(kept, OLD_S)
    assert _remove(tmp_path, tmp_path / "port-8000") == []


def test_a_lock_on_a_removed_file_excludes_no_server(tmp_path: Path) -> None:
    directory = _leave(tmp_path / "port-8001")
    with (directory / "journal.lock").open("r+b") as opened:  # as a server does that starts just now
        assert _remove(tmp_path, tmp_path / "port-8000") == [directory.name]
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        DiskJournal(directory).close()


def test_a_server_takes_no_lock_on_a_removed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process acts between two system calls of this one; here it acts inside of the second call."""
    directory = _leave(tmp_path / "port-8001")
    really_lock = fcntl.flock
    removed: list[str] = []

    def remove_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", really_lock)
        removed.extend(_remove(tmp_path, tmp_path / "port-8000"))
        really_lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    lock = hold_lock(directory / "journal.lock")
    assert removed == [directory.name]
    with pytest.raises(ModelError, match="Another server uses the journal"):
        DiskJournal(directory)
    os.close(lock)


def test_a_locked_journal_is_kept(tmp_path: Path) -> None:
    held = tmp_path / "port-8001"
    journal = DiskJournal(held, lifetime_s=LIFETIME_S)
    try:
        _set_idle(held, OLD_S)
        assert [found.is_held for found in find_journals(tmp_path)] == [True]
        assert _remove(tmp_path, tmp_path / "port-8000") == []
    finally:
        journal.close()
    assert [found.is_held for found in find_journals(tmp_path)] == [False]


def test_a_journal_with_durable_streams_is_kept(tmp_path: Path) -> None:
    kept = tmp_path / "port-8001"
    journal = DiskJournal(kept, lifetime_s=LIFETIME_S)
    journal._database.add_notes([(b"key", b"body")])
    journal.close()
    _set_idle(kept, OLD_S)
    assert _remove(tmp_path, tmp_path / "port-8000") == []
    assert (kept / "journal.sqlite").exists()


def test_an_unused_journal_is_removed_and_one_with_content_is_kept(tmp_path: Path) -> None:
    unused, used, damaged = tmp_path / "port-1", tmp_path / "port-2", tmp_path / "port-3"
    for directory in (unused, damaged):
        DiskJournal(directory).close()
    (damaged / "journal.damaged-20260101T000000.sqlite").write_bytes(b"evidence")
    journal = DiskJournal(used)
    journal._database.add_notes([(b"key", b"body")])
    remove_unused_journal(used)  # held
    journal.close()
    for directory in (unused, used, damaged, tmp_path / "none"):
        remove_unused_journal(directory)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [used.name, damaged.name]
    assert (damaged / "journal.sqlite").exists()


def test_a_journal_with_recorded_damage_is_kept(tmp_path: Path) -> None:
    """Otherwise the next server would report a lost stream as unknown."""
    damaged = tmp_path / "port-1"
    DiskJournal(damaged).close()
    with closing(sqlite3.connect(damaged / "journal.sqlite")) as connection:
        connection.execute("INSERT INTO facts VALUES ('damaged', ?)", (stamp().encode(),))
        connection.commit()
    remove_unused_journal(damaged)
    assert (damaged / "journal.sqlite").exists()
    journal = DiskJournal(damaged)
    assert journal.damage_age_s() is not None
    journal.close()


def test_reading_a_journal_changes_nothing(tmp_path: Path) -> None:
    """Opening a journal for writing moves its write-ahead log into the database, and hides that its end was lost."""
    running = DiskJournal(tmp_path / "running", lifetime_s=10 * LIFETIME_S)
    running._database.add_notes([(b"key", b"body")])
    left = tmp_path / "port-8001"  # as a server leaves it that was killed
    shutil.copytree(tmp_path / "running", left)
    running.close()
    _set_idle(left, OLD_S)
    files = [left / "journal.sqlite", left / "journal.sqlite-wal"]
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    assert before[1][0]
    assert _remove(tmp_path, tmp_path / "port-8000") == []
    remove_unused_journal(left)
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in files] == before


@pytest.mark.skipif(sys.platform != "linux", reason="needs a directory in which no file can be made")
def test_a_lock_that_cannot_be_made_is_reported_at_once() -> None:
    with pytest.raises(ModelError, match=r"The journal cannot be kept in /proc: No such file or directory"):
        DiskJournal(Path("/proc"))


def test_foreign_files_and_broken_journals_are_kept(tmp_path: Path) -> None:
    beside = _leave(tmp_path / "port-8001")
    (beside / "journal.damaged-20260101T000000.sqlite").write_bytes(b"evidence")
    broken = _leave(tmp_path / "port-8002")
    (broken / "journal.sqlite").write_bytes(b"not a database" * 100)
    _set_idle(broken, OLD_S)
    assert _remove(tmp_path, tmp_path / "port-8000") == [beside.name]
    assert [path.name for path in beside.iterdir()] == ["journal.damaged-20260101T000000.sqlite"]
    assert (broken / "journal.sqlite").exists()


@pytest.mark.parametrize("missing", ["nothing", "no folder"])
def test_no_journals(tmp_path: Path, missing: str) -> None:
    assert find_journals(tmp_path if missing == "nothing" else tmp_path / "gone") == []
