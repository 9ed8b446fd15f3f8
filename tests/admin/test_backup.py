"""`tailrace backup` of a server that writes, and a server on the restored directory."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import signal
import sqlite3
import stat
import subprocess
import tarfile
import threading
import zlib
from pathlib import Path

import httpx
import pytest
from tests.api.forks import run_text
from tests.api.oracle import Answer
from tests.api.process import TAILRACE, Server, environment
from tests.waiting import LONG_S, until

from tailrace_outer.admin.data_copies import BackupFailed, restore_backup, write_backup

_FAST = "scripted:tokens_per_s=400"


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_text([TAILRACE, *arguments], environment())


def _begin(server: Server, answer: Answer) -> str:
    body = {"prompt": answer.prompt, "max_tokens": answer.count, "seed": answer.seed}
    begun = server.http.post("/v1/streams", json=body)
    assert begun.status_code in (200, 201, 202), begun.text
    return str(begun.json()["id"])


def _text(server: Server, stream_id: str) -> str:
    """Read a stream from its start to its end."""
    parts = []
    with server.http.stream("GET", f"/v1/streams/{stream_id}/events", timeout=LONG_S) as events:
        assert events.status_code == 200, events.read()
        for line in events.iter_lines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                parts.append(event.get("text", ""))
    assert event["status"] == "done", event
    return "".join(parts)


@pytest.mark.deep
def test_a_backup_under_load_is_restored_under_load(tmp_path: Path) -> None:
    """Streams that had ended are there, running ones go on with the same tokens, and a key still works."""
    original, restored = tmp_path / "data", tmp_path / "restored"
    ended = [Answer(f"Ended {number}.", 40, seed=number) for number in range(4)]
    running = [Answer(f"Running {number}.", 2000, seed=number) for number in range(4)]
    stop = threading.Event()
    with contextlib.closing(Server(_FAST, "--data-dir", str(original)).wait_ready()) as server:
        ids = [_begin(server, answer) for answer in ended]
        assert [_text(server, stream_id) for stream_id in ids] == [answer.text for answer in ended]
        ids += [_begin(server, answer) for answer in running]

        def write() -> None:
            with httpx.Client(base_url=server.url, trust_env=False, timeout=LONG_S) as client:
                number = 0
                while not stop.is_set():
                    number += 1
                    client.post("/v1/completions", json={"prompt": f"Load {number}.", "max_tokens": 5})

        load = [threading.Thread(target=write) for _ in range(2)]
        for thread in load:
            thread.start()
        try:
            for number in range(3):
                made = _command("backup", str(tmp_path / f"{number}.tar.gz"), "--data-dir", str(original))
                assert made.returncode == 0, made.stderr
        finally:
            stop.set()
            for thread in load:
                thread.join(LONG_S)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(LONG_S)
    back = _command("restore", str(tmp_path / "1.tar.gz"), "--data-dir", str(restored))
    assert back.returncode == 0, back.stderr
    with contextlib.closing(Server(_FAST, "--data-dir", str(restored)).wait_ready()) as server:
        _begin(server, Answer("More load.", 2000, seed=1))
        for stream_id, answer in zip(ids, [*ended, *running], strict=True):
            assert _text(server, stream_id) == answer.text


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_directory_of_a_server_that_ended(how: signal.Signals, tmp_path: Path) -> None:
    original, answer = tmp_path / "data", Answer("Ended.", 40, seed=1)
    with contextlib.closing(Server(_FAST, "--data-dir", str(original)).wait_ready()) as server:
        stream_id = _begin(server, answer)
        assert _text(server, stream_id) == answer.text
        server.process.send_signal(how)
        server.process.wait(LONG_S)
    before = {path: path.read_bytes() for path in original.rglob("*.sqlite*") if not path.name.endswith("-shm")}
    write_backup(original, tmp_path / "b.tar.gz")
    assert {path: path.read_bytes() for path in before} == before
    restore_backup(tmp_path / "b.tar.gz", tmp_path / "restored")
    with contextlib.closing(Server(_FAST, "--data-dir", str(tmp_path / "restored")).wait_ready()) as server:
        assert _text(server, stream_id) == answer.text


def test_keys_and_other_files_are_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    made = _command(
        "keys", "create", "alice", "--data-dir", str(data), "--database", f"sqlite:///{data}/records.sqlite"
    )
    assert made.returncode == 0, made.stderr
    (data / "certificates").mkdir()
    (data / "certificates" / "one.json").write_text("{}")
    os.symlink("/etc/passwd", data / "link")
    write_backup(data, tmp_path / "b.tar.gz")
    assert stat.S_IMODE((tmp_path / "b.tar.gz").stat().st_mode) == 0o600
    names = [name for name, _ in restore_backup(tmp_path / "b.tar.gz", tmp_path / "new" / "place")]
    assert sorted(names) == ["certificates/one.json", "records.sqlite"]
    with contextlib.closing(sqlite3.connect(tmp_path / "new" / "place" / "records.sqlite")) as database:
        assert database.execute("SELECT owner FROM keys").fetchall() == [("alice",)]
    assert stat.S_IMODE((tmp_path / "new" / "place" / "records.sqlite").stat().st_mode) == 0o600


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    missing = _command("backup", str(tmp_path / "b.tar.gz"), "--data-dir", str(tmp_path / "data"))
    assert missing.returncode == 1
    assert "has no data" in missing.stderr
    (tmp_path / "data" / "file").write_text("x")
    write_backup(tmp_path / "data", tmp_path / "b.tar.gz")
    with pytest.raises(BackupFailed, match="exists already"):
        write_backup(tmp_path / "data", tmp_path / "b.tar.gz")
    with pytest.raises(BackupFailed, match="is not empty"):
        restore_backup(tmp_path / "b.tar.gz", tmp_path / "data")
    with pytest.raises(BackupFailed, match="cannot be written"):
        write_backup(tmp_path / "data", tmp_path / "no" / "b.tar.gz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.tar.gz", "data"]


def test_a_mounted_disk_is_restored_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be removed or replaced, and has a directory of its file system."""
    data, disk = tmp_path / "data", tmp_path / "disk"
    (data / "folder").mkdir(parents=True)
    for name in ("one", "folder/two"):
        (data / name).write_text(name)
    write_backup(data, tmp_path / "b.tar.gz")
    (disk / "lost+found").mkdir(parents=True)
    number = disk.stat().st_ino
    assert _command("restore", str(tmp_path / "b.tar.gz"), "--data-dir", str(disk)).returncode == 0
    assert disk.stat().st_ino == number
    assert sorted(path.name for path in disk.iterdir()) == ["folder", "lost+found", "one"]
    assert (disk / "folder" / "two").read_text() == "folder/two"

    empty = tmp_path / "empty"
    empty.mkdir()
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == "one" and target.parent == empty:
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(BackupFailed, match="Nothing was changed"):
        restore_backup(tmp_path / "b.tar.gz", empty)
    assert list(empty.iterdir()) == []


def test_a_backup_is_not_made_into_the_data_directory(tmp_path: Path) -> None:
    (tmp_path / "data" / "folder").mkdir(parents=True)
    (tmp_path / "data" / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    for place in ("data", "data/folder", "link", "link/folder/../folder"):
        with pytest.raises(BackupFailed, match="is in the data directory"):
            write_backup(tmp_path / "data", tmp_path / place / "b.tar.gz")
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["file", "folder"]


@pytest.mark.parametrize(
    ("name", "kind"), [("../evil", b"0"), ("/evil", b"0"), ("link", b"2"), ("device", b"3"), ("a/../../evil", b"0")]
)
def test_members_outside_the_directory_are_refused(name: str, kind: bytes, tmp_path: Path) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as tar:
        tar.addfile(member, io.BytesIO())
    with pytest.raises(BackupFailed, match="is not a backup"):
        restore_backup(tmp_path / "b.tar.gz", tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["b.tar.gz"]


def _unpacked(archive: bytes) -> bytes | None:
    try:
        return gzip.decompress(archive)
    except (OSError, EOFError, zlib.error):
        return None


def test_a_damaged_backup_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "journal.sqlite")) as database:
        database.execute("CREATE TABLE t AS SELECT randomblob(100000) AS b")
        database.commit()
    write_backup(tmp_path / "data", tmp_path / "b.tar.gz")
    whole = (tmp_path / "b.tar.gz").read_bytes()
    cut = [whole[: len(whole) * part // 8] for part in range(8)] + [whole[:-1]]
    changed = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(100, len(whole), 9973)]
    # A bit that describes a code which occurs nowhere changes nothing.
    for damaged in cut + [one for one in changed if _unpacked(one) != _unpacked(whole)]:
        (tmp_path / "b.tar.gz").write_bytes(damaged)
        with pytest.raises(BackupFailed):
            restore_backup(tmp_path / "b.tar.gz", tmp_path / "new")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["b.tar.gz", "data"]
    until(lambda: not list(tmp_path.glob(".new-*")))
