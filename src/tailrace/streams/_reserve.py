"""Disk space that is kept free for the ends of streams."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from tailrace.errors import StorageError
from tailrace.streams._files import open_own
from tailrace.streams._sqlite_errors import journal_full

__all__ = ["Reserve"]

_BYTES = 2**20


class Reserve:
    """A file beside the journal that is deleted when the disk is full, so that the ends of streams can be written."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "journal.reserve"

    def hold(self) -> None:
        """Allocate the file. Raises: StorageError if it is not a file of this user, JournalFull if the disk is full."""
        try:
            descriptor = open_own(self._path, os.O_WRONLY)
            try:
                os.posix_fallocate(descriptor, 0, _BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EPERM, errno.EISDIR, errno.ENXIO):
                raise StorageError("The file journal.reserve is not a regular file of this user.") from error
            self.free()
            raise journal_full() from error

    def free(self) -> None:
        """Delete the file."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
