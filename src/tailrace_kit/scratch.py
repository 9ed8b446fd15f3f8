"""Temporary directories of processes that may be killed. The next process removes what a killed process has left."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["scratch_directory"]

_NEW_S = 60.0  # a younger directory may not be locked yet


@contextmanager
def scratch_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a temporary directory with this prefix, in `parent` or the default one. It is removed at the end. After a
    kill, the next call with the same prefix removes it.

    Raises: OSError.
    """
    parent = parent or Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    for old in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # in use by another process, or of another user
            if time.time() - old.stat().st_mtime > _NEW_S:
                os.close(_locked(old))
                shutil.rmtree(old, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        lock = _locked(directory)
        try:
            yield directory
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _locked(directory: Path) -> int:
    """Lock a directory for this process's life; returns the descriptor. Raises: OSError if another process has the
    lock."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
