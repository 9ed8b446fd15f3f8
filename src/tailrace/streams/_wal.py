"""The journal's write-ahead log on its way to the disk, which is waited for in threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from pathlib import Path

from tailrace.errors import StorageError
from tailrace.streams._database import Database

__all__ = ["WriteAheadLog"]

_CHECKPOINT_BYTES = 8 * 2**20
_RESTART_BYTES = 32 * 2**20


class WriteAheadLog:
    """Holds a descriptor, so that syncing works when there is none to be had, and a connection of its own."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._path = Path(f"{database.path}-wal")
        self._second = database.connect()
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    async def sync(self) -> None:
        """Return when the disk has what was committed. Raises: OSError."""
        await asyncio.to_thread(os.fdatasync, self._descriptor)

    async def checkpoint(self) -> None:
        """Empty the log in time: most of it beside the writer, and the little that is left then between two commits."""
        with contextlib.suppress(OSError, sqlite3.Error, StorageError):
            num_bytes = self._path.stat().st_size
            if num_bytes > _CHECKPOINT_BYTES:
                await asyncio.to_thread(_passive, self._second)
            if num_bytes > _RESTART_BYTES:
                await asyncio.to_thread(_passive, self._second)
                self._database.checkpoint()

    async def empty(self) -> None:
        """Leave nothing in it, as far as writers let that be."""
        with contextlib.suppress(sqlite3.Error, StorageError):
            await asyncio.to_thread(_passive, self._second)
            self._database.checkpoint(truncate=True)

    def close(self) -> None:
        self._second.close()
        os.close(self._descriptor)


def _passive(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
