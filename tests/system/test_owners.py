"""What root creates in another user's directory belongs to that user."""

from __future__ import annotations

import os
import stat
from contextlib import closing
from pathlib import Path

import pytest
from tests.missing import missing_reason

from tailrace.access.audit import open_audit_log
from tailrace.records.key_store import KeyStore
from tailrace.records.record_database import RecordDatabase
from tailrace.settings import Settings
from tailrace.system.owners import create_file, give_tree, make_directory
from tailrace_outer.admin.data_copies import restore_backup, write_backup

_UID, _GID = 65534, 65533

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason=missing_reason("root"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The directory of another user."""
    made = tmp_path / "home"
    made.mkdir()
    os.chown(made, _UID, _GID)
    return made


def _owners(directory: Path) -> dict[str, tuple[int, int]]:
    """Return the user and the group of everything in a directory."""
    paths = sorted(directory.rglob("*"))
    return {str(path.relative_to(directory)): (path.lstat().st_uid, path.lstat().st_gid) for path in paths}


@needs_root
def test_keys_of_root(home: Path) -> None:
    """Also the files that SQLite makes while the database is open belong to the user."""
    with closing(RecordDatabase(f"sqlite:///{home}/data/records.sqlite")) as database:
        database.prepare()
        KeyStore(database).create("alice")
        owners = _owners(home)
    assert set(owners) == {"data", *(f"data/records.sqlite{end}" for end in ("", "-wal", "-shm"))}
    assert set(owners.values()) == {(_UID, _GID)}


@needs_root
def test_an_audit_log_of_root(home: Path) -> None:
    """`sudo tailrace keys` may write the first line; a server that cannot open the file does not start."""
    with open_audit_log(Settings(audit_log=f"{home}/audit.jsonl")) as audit:
        audit.add_command("key.create")
    assert _owners(home) == {"audit.jsonl": (_UID, _GID)}
    assert stat.S_IMODE((home / "audit.jsonl").stat().st_mode) == 0o600


@needs_root
@pytest.mark.parametrize("is_there", [False, True])
def test_a_backup_that_root_restores(is_there: bool, home: Path, tmp_path: Path) -> None:
    with closing(RecordDatabase(f"sqlite:///{tmp_path}/old/records.sqlite")) as database:
        database.prepare()
    (tmp_path / "old" / "certificates").mkdir()
    (tmp_path / "old" / "certificates" / "one.json").write_text("{}")
    write_backup(tmp_path / "old", tmp_path / "b.tar.gz")
    target = home if is_there else home / "new" / "data"
    restore_backup(tmp_path / "b.tar.gz", target)
    assert set(_owners(target)) == {"certificates", "certificates/one.json", "records.sqlite"}
    assert set(_owners(home).values()) == {(_UID, _GID)}
    assert (home.stat().st_uid, home.stat().st_gid) == (_UID, _GID)


@needs_root
def test_files_from_elsewhere_keep_their_owner(home: Path, tmp_path: Path) -> None:
    """The user must not get a file of root by a symbolic link."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_text("x")
    (home / "records.sqlite").symlink_to(secret / "file")
    (home / "data").mkdir()
    (home / "data" / "link").symlink_to(secret)
    create_file(home / "records.sqlite")
    give_tree(home / "data", home)
    assert {secret.stat().st_uid, (secret / "file").stat().st_uid} == {0}
    assert (home / "data").stat().st_uid == _UID


def test_only_the_owner_can_read_a_new_file(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b")
    create_file(tmp_path / "a" / "b" / "file")
    assert stat.S_IMODE((tmp_path / "a" / "b" / "file").stat().st_mode) == 0o600


def test_what_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    create_file(tmp_path / "file")
    make_directory(tmp_path)
    assert (tmp_path / "file").read_text() == "x"
    with pytest.raises(FileExistsError):
        make_directory(tmp_path / "file")
