"""Open the journal's files safely, lock them, and find damage in a write-ahead log."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from contextlib import suppress
from pathlib import Path

__all__ = ["has_lost_commits", "hold_lock", "is_at", "open_own"]

_HEADER = struct.Struct(">8I")  # magic, version, bytes of a page, checkpoints, salt 1 and 2, checksum 1 and 2
_FRAME = struct.Struct(">4I")  # page, pages in the database if it ends a transaction, salt 1 and 2
_FRAME_BYTES = 24  # with two checksums
_LOCK_TRIES = 100
_MAGIC = 0x377F0682  # plus 1 if checksums are big-endian


def open_own(path: Path, flags: int) -> int:
    """Open a file that only its owner may read or write, and return its descriptor. Creates the file if it is missing.

    Raises: OSError if it cannot be opened, is a symbolic link, is not a regular file, or belongs to another user.
    """
    # Without O_NONBLOCK, opening a pipe would block.
    flags |= os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or os.geteuid() not in (0, found.st_uid):
            raise PermissionError(errno.EPERM, "it is not a regular file of this user", str(path))
        os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def hold_lock(path: Path) -> int:
    """Create a lock file with its directories, and lock it. Returns its descriptor; closing it unlocks the file.

    Raises: BlockingIOError if another process holds the lock, and OSError as `open_own`.
    """
    missing: OSError = OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
    for _ in range(_LOCK_TRIES):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            descriptor = open_own(path, os.O_RDWR)
        except FileNotFoundError as error:
            missing = error
            continue  # another process has just removed the directory with an old journal
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        if is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # another process has just removed the file with an old journal, so this lock is useless
    raise missing  # no other process removes it so often: this file system, such as /proc, takes no files


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file is still the file at this path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    return False


def has_lost_commits(path: Path, num_read: int) -> bool:
    """Return whether an SQLite write-ahead log has transactions after the `num_read` frames that SQLite has read.

    SQLite silently stops reading at the first damaged frame. The last transaction does not count, since it may be
    incomplete.
    *Source:* https://www.sqlite.org/fileformat2.html#walformat
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    if len(content) < _HEADER.size:
        return False
    magic, _, page_bytes, _, *rest = _HEADER.unpack_from(content)
    salts, checksums = tuple(rest[:2]), tuple(rest[2:])
    if magic & ~1 != _MAGIC or _checksums(content[:24], is_big=bool(magic & 1)) != checksums:
        return len(content) > _HEADER.size  # without a valid header, SQLite reads no frames
    num_commits = 0
    step = _FRAME_BYTES + page_bytes
    for start in range(_HEADER.size + num_read * step, len(content) - step + 1, step):
        _, num_pages, *frame_salts = _FRAME.unpack_from(content, start)
        num_commits += bool(num_pages) and tuple(frame_salts) == salts
    return num_commits > 1


def _checksums(content: bytes, *, is_big: bool) -> tuple[int, int]:
    first = second = 0
    words = struct.unpack(f"{'>' if is_big else '<'}{len(content) // 4}I", content)
    for one, other in zip(words[::2], words[1::2], strict=True):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second
