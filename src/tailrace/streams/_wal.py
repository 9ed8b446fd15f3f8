"""Sync and checkpoint the journal's write-ahead log, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tailrace.errors import StorageError
from tailrace.streams._database import Database

__all__ = ["WriteAheadLog"]

_Argument = TypeVar("_Argument")

_CHECKPOINT_BYTES = 8 * 2**20
_RESTART_BYTES = 32 * 2**20


class WriteAheadLog:
    """Has its own connection, and an open descriptor, so that syncing works when the process has no descriptors
    left."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._path = Path(f"{database.path}-wal")
        self._second = database.connect()
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._thread = ThreadPoolExecutor(1, "journal")  # asyncio's own threads may all be busy, with long prompts

    async def sync(self) -> None:
        """Sync all commits to the disk. Raises: OSError."""
        await self._in_thread(os.fdatasync, self._descriptor)

    async def checkpoint(self) -> None:
        """Checkpoint a large log: most of it in a thread beside the writer, the rest between two commits."""
        with contextlib.suppress(OSError, sqlite3.Error, StorageError):
            num_bytes = self._path.stat().st_size
            if num_bytes > _CHECKPOINT_BYTES:
                await self._in_thread(_passive, self._second)
            if num_bytes > _RESTART_BYTES:
                await self._in_thread(_passive, self._second)
                self._database.checkpoint()

    async def empty(self) -> None:
        """Checkpoint and truncate the log, as far as concurrent commits allow."""
        with contextlib.suppress(sqlite3.Error, StorageError):
            await self._in_thread(_passive, self._second)
            self._database.checkpoint(truncate=True)

    async def _in_thread(self, function: Callable[[_Argument], None], argument: _Argument) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, function, argument)

    def close(self) -> None:
        self._thread.shutdown()
        self._second.close()
        os.close(self._descriptor)


def _passive(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
