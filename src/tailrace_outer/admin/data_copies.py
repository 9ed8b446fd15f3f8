"""Copies a data directory into one file while servers use it, and makes a directory of such a file again.

A database is copied with SQLite's online backup in one read transaction: the copy is the database at one moment, with
everything that was committed before, and no writer waits. Other files are copied as they are. Journals come last, so
that they have the streams that the records name.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sqlite3
import stat
import tarfile
import tempfile
import zlib
from contextlib import closing
from pathlib import Path, PurePosixPath

from tailrace.system.owners import give_tree, make_directory

__all__ = ["BackupFailed", "restore_backup", "write_backup"]

_MAGIC = b"SQLite format 3\0"
_JOURNAL = "journal.sqlite"
# Parts of a running database or server. The copy of a database contains its write-ahead log.
_NOT_COPIED = ("-wal", "-shm", "-journal", ".lock", ".reserve")
_OF_MOUNTS = ("lost+found",)  # what the root of an empty disk may have
_MAX_FILES = 100_000
_CHUNK_BYTES = 1 << 20


class BackupFailed(Exception):
    """The message says what happened and what to do."""


def write_backup(directory: Path, archive: Path) -> list[tuple[str, int]]:
    """Copy a data directory to a new file, which only its owner can read. Returns the names and bytes of what is in it.

    *Cancellation:* leaves no file. *Raises:* BackupFailed.
    """
    names = _files_of(directory)
    if not names:
        raise BackupFailed(f"{directory} has no data. Name the server's directory with --data-dir.")
    if archive.exists():
        raise BackupFailed(f"{archive} exists already. Nothing was changed.")
    if archive.parent.resolve().is_relative_to(directory.resolve()):
        raise BackupFailed(f"{archive} is in the data directory: the next backup would contain it. Name another path.")
    part = archive.with_name(f".{archive.name}.part")
    written = []
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with (
            os.fdopen(descriptor, "wb") as target,
            tarfile.open(fileobj=target, mode="w:gz", compresslevel=1) as tar,
            tempfile.TemporaryDirectory(prefix="tailrace-backup-", dir=archive.parent.absolute()) as scratch,
        ):
            for name in names:
                copied = _copied(directory / name, Path(scratch) / "copy")
                if copied is None:
                    continue  # it was deleted meanwhile
                tar.add(copied, arcname=name, filter=_for_owner_only)
                written.append((name, copied.stat().st_size))
                copied.unlink()
            tar.close()
            target.flush()
            os.fsync(target.fileno())
        part.rename(archive)
    except (OSError, sqlite3.Error) as error:
        raise BackupFailed(f"The backup cannot be written to {archive}: {_reason(error)}.") from error
    finally:
        part.unlink(missing_ok=True)
    return written


def restore_backup(archive: Path, directory: Path) -> list[tuple[str, int]]:
    """Make a data directory of a backup. It must not exist, or be empty, such as a mounted disk. Returns the names and
    bytes of its files. Root gives them to the owner of the directory, or of the one above it.

    *Cancellation:* leaves nothing. *Raises:* BackupFailed, also if the backup is damaged.
    """
    try:
        is_there = directory.exists()
        if is_there and (not directory.is_dir() or any(path.name not in _OF_MOUNTS for path in directory.iterdir())):
            raise BackupFailed(f"{directory} is not empty. Move it away, or name another one with --data-dir.")
        make_directory(directory.parent)
        # An empty directory may be where a disk is mounted, which cannot be replaced.
        parent = directory if is_there else directory.parent
        staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=parent))
    except OSError as error:
        raise BackupFailed(f"{directory} cannot be made: {_reason(error)}. Nothing was changed.") from error
    restored = []
    try:
        with gzip.open(archive) as whole, tarfile.open(fileobj=whole, mode="r:") as tar:
            for number, member in enumerate(tar):
                if number >= _MAX_FILES or not _is_plain(member):
                    raise BackupFailed(f"{archive} is not a backup of tailrace: it contains {member.name!r:.100}.")
                path = staging / member.name
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                content = tar.extractfile(member)
                assert content is not None  # a regular file
                with content, os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target:
                    shutil.copyfileobj(content, target)
                    target.flush()
                    os.fsync(target.fileno())
                _check(path)
                restored.append((member.name, member.size))
            while whole.read(_CHUNK_BYTES):  # to its end, where the checksum is
                pass
        give_tree(staging, parent)
        if is_there:
            _move_into(staging, directory)
        else:
            staging.rename(directory)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, sqlite3.DatabaseError) as error:
        raise BackupFailed(f"{archive} is damaged, or not a backup ({_reason(error)}). Nothing was changed.") from error
    except OSError as error:
        raise BackupFailed(f"The backup cannot be restored: {_reason(error)}. Nothing was changed.") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return restored


def _move_into(staging: Path, directory: Path) -> None:
    """Move everything to a directory above, journals last: all or nothing. Raises: OSError."""
    moved = []
    try:
        for path in sorted(staging.iterdir(), key=lambda one: (one.name == _JOURNAL, one.name)):
            path.rename(directory / path.name)
            moved.append(path.name)
    except BaseException:
        for name in moved:
            (directory / name).rename(staging / name)
        raise


def _files_of(directory: Path) -> list[str]:
    """Return the files to copy, journals last."""
    found = [
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and not path.is_symlink() and not path.name.endswith(_NOT_COPIED)
    ]
    return sorted(found, key=lambda name: (PurePosixPath(name).name == _JOURNAL, name))


def _copied(path: Path, copy: Path) -> Path | None:
    """Copy a file, a database as it is at one moment. Returns None if the file is gone."""
    try:
        with path.open("rb") as content:
            if content.read(len(_MAGIC)) != _MAGIC:
                content.seek(0)
                with copy.open("wb") as target:
                    shutil.copyfileobj(content, target)
                return copy
    except FileNotFoundError:
        return None
    with (
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as source,
        closing(sqlite3.connect(copy)) as target_database,
    ):
        source.backup(target_database)  # in one step, so no writer makes it begin again
    return copy


def _check(path: Path) -> None:
    """Raises: sqlite3.DatabaseError if a database is damaged."""
    with path.open("rb") as content:
        if content.read(len(_MAGIC)) != _MAGIC:
            return
    with closing(sqlite3.connect(path)) as database:
        (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(found)


def _for_owner_only(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who owned the file where it was."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = stat.S_IRUSR | stat.S_IWUSR
    return member


def _is_plain(member: tarfile.TarInfo) -> bool:
    """Return whether a member is a regular file inside the directory."""
    path = PurePosixPath(member.name)
    return member.isreg() and not path.is_absolute() and ".." not in path.parts and len(path.parts) <= 8


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)) or type(error).__name__
