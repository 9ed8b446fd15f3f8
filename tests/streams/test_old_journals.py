"""Which journals of other servers are removed, and which stay."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tailrace.streams.disk import DiskJournal
from tailrace.streams.old_journals import LONGEST_LINGER_S, find_journals, remove_expired_journals

RETENTION_S = 900.0
OLD_S = LONGEST_LINGER_S + RETENTION_S + 60


def _leave(directory: Path, idle_s: float = OLD_S) -> Path:
    """A journal that a server has left, last written so long ago."""
    DiskJournal(directory).close()
    _set_idle(directory, idle_s)
    return directory


def _set_idle(directory: Path, idle_s: float) -> None:
    for path in directory.iterdir():
        os.utime(path, (time.time() - idle_s,) * 2)


def _remove(data: Path, keep: Path) -> list[str]:
    return [path.name for path in remove_expired_journals(data, retention_s=RETENTION_S, keep=keep)]


def test_expired_ones_go_and_others_stay(tmp_path: Path) -> None:
    own = _leave(tmp_path / "port-8000")
    gone = _leave(tmp_path / "port-8001")
    app = _leave(tmp_path / "app-bot-0a1b2c3d-port-8000")
    recent = _leave(tmp_path / "port-8002", OLD_S - 600)
    other = tmp_path / "certificates"
    other.mkdir()
    assert _remove(tmp_path, own) == [app.name, gone.name]
    assert {path.name for path in tmp_path.iterdir()} == {own.name, recent.name, other.name}
    assert _remove(tmp_path, own) == []


def test_one_that_a_server_holds_stays(tmp_path: Path) -> None:
    held = tmp_path / "port-8001"
    journal = DiskJournal(held)
    try:
        _set_idle(held, OLD_S)
        assert [found.is_held for found in find_journals(tmp_path)] == [True]
        assert _remove(tmp_path, tmp_path / "port-8000") == []
    finally:
        journal.close()
    assert [found.is_held for found in find_journals(tmp_path)] == [False]


def test_one_with_durable_streams_stays(tmp_path: Path) -> None:
    kept = tmp_path / "port-8001"
    journal = DiskJournal(kept)
    journal._database.note(b"key", b"body")
    journal.close()
    _set_idle(kept, OLD_S)
    assert _remove(tmp_path, tmp_path / "port-8000") == []
    assert (kept / "journal.sqlite").exists()


def test_foreign_files_and_broken_journals_stay(tmp_path: Path) -> None:
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
