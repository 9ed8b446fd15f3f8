"""Directories of processes that may be killed at any moment: what one leaves behind, the next one takes away."""

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

_NEW_S = 60.0  # by then whoever made one has locked it


@contextmanager
def scratch_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A new directory whose name begins so, in `parent` or where temporary files go. It is gone at the end, or, where
    its process was killed, when the next one makes such a directory.

    Raises: OSError.
    """
    parent = parent or Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # somebody's who is alive, or not ours at all
            if time.time() - left.stat().st_mtime > _NEW_S:
                os.close(_locked(left))
                shutil.rmtree(left, ignore_errors=True)
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
    """A descriptor that holds it for as long as this process lives. Raises: OSError if another one does."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
