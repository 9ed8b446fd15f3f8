"""The journal's files: opened only where they are our own, and a write-ahead log looked through for damage."""

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
_MAGIC = 0x377F0682  # or one more, where checksums are big-endian


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a file that only its owner may read or write; it is made if it is not there.

    Raises: OSError if it cannot be had, is a symbolic link, is not a plain file, or belongs to somebody else.
    """
    # Without O_NONBLOCK, a pipe would be waited for.
    flags |= os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or os.geteuid() not in (0, found.st_uid):
            raise PermissionError(errno.EPERM, "it is not a plain file of this user's", str(path))
        os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def hold_lock(path: Path) -> int:
    """Make a lock file, with its directories, and lock it; returns its descriptor, whose closing unlocks it.

    Raises: BlockingIOError if another process holds it, and OSError as `open_own`.
    """
    missing: OSError = OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
    for _ in range(_LOCK_TRIES):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            descriptor = open_own(path, os.O_RDWR)
        except FileNotFoundError as error:
            missing = error
            continue  # the directory has just been removed with an old journal
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        if is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # the file has just been removed with an old journal: a lock on it keeps nobody out
    raise missing  # nobody removes it that often: this is no place for files, such as /proc


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the file that is open is the one that has this path now."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    return False


def has_lost_commits(path: Path, num_read: int) -> bool:
    """Whether a write-ahead log of SQLite's has transactions behind the `num_read` frames that SQLite has read.

    SQLite stops reading at the first frame that is not what was written, and says nothing. The last transaction does
    not count: it may be one that was never complete.
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
        return len(content) > _HEADER.size  # whatever is there, nothing of it can be read
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
