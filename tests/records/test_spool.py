"""Rows wait in a file of the server, and survive it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from tailrace.errors import StorageError
from tailrace.records.request_rows import RUNNING, RequestRow
from tailrace.records.spool import Spool

_MANY = 2**30


def _row(name: str, status: str = "done", **values: object) -> RequestRow:
    return msgspec.convert(
        {"request_id": name, "created_s": 1.0, "owner": "alice", "key_id": "k", "model": "m", "wire": "w"}
        | {"status": status, **values},
        RequestRow,
    )


def test_rows_can_be_read_and_survive_the_process(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "records")
    rows = [_row("a", RUNNING), _row("b"), _row("a", answer="line\u2028 one\nand two")]
    for row in rows:
        spool.append(row)
    assert spool.read(0, _MANY) == (rows, spool.size)
    (path,) = (tmp_path / "records").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    spool.close()
    assert Spool(tmp_path / "records").take_over() == [rows[2], rows[1]]


def test_it_is_read_in_parts_of_whole_rows(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    rows = [_row(f"row{number}", prompt="x" * number * 50) for number in range(30)]
    spool.append_all(rows)
    found: list[RequestRow] = []
    place = 0
    while place < spool.size:
        some, num_bytes = spool.read(place, 700)
        assert some
        found += some
        place += num_bytes
    assert found == rows
    spool.close()


def test_stored_rows_are_removed_and_running_ones_kept(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    running = _row("running", RUNNING)
    spool.append_all([running, _row("done")])
    size = spool.size
    spool.append(_row("later"))
    spool.drop(size, [running])
    assert spool.read(0, _MANY)[0] == [running, _row("later")]
    spool.append(_row("running"))
    spool.drop(spool.size, [])
    assert spool.size == 0
    spool.append(_row("next"))
    assert spool.read(0, _MANY)[0] == [_row("next")]
    spool.drop(spool.size, [])
    spool.close()
    assert not tmp_path.exists()


def test_two_servers_over_one_directory_have_a_file_each(tmp_path: Path) -> None:
    one, other = Spool(tmp_path), Spool(tmp_path)
    one.append(_row("one"))
    assert other.take_over() == []
    other.append(_row("other"))
    one.close()
    third = Spool(tmp_path)
    assert third.take_over() == [_row("one")]
    other.close()
    third.close()
    assert sorted(row.request_id for row in Spool(tmp_path).take_over()) == ["one", "other"]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("damage", [b'{"request_id": "half', b"\xff\xfe nonsense\n", b"{}\n"])
def test_damaged_lines_are_skipped(tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "requests.jsonl").write_bytes(msgspec.json.encode(_row("one")) + b"\n" + damage)
    spool = Spool(tmp_path)
    assert spool.take_over() == [_row("one")]
    assert "damaged" in caplog.text
    spool.append(_row("two"))
    assert [row.request_id for row in spool.read(0, _MANY)[0]] == ["one", "two"]
    spool.close()


def test_a_full_disk_is_an_error_and_the_next_row_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path)
    spool.append(_row("one"))
    write = os.write
    room = [20]

    def write_little(file: int, text: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        num_bytes, room[0] = write(file, text[: room[0]]), 0
        return num_bytes

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_little)
        with pytest.raises(StorageError, match="No space left"):
            spool.append(_row("two"))
    spool.append(_row("two"))
    assert [row.request_id for row in spool.read(0, _MANY)[0]] == ["one", "two"]
    spool.close()


def test_a_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be recorded"):
        Spool(tmp_path / "file").append(_row("one"))
