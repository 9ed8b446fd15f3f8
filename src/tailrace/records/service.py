"""A server's records. Nothing of the database is imported before there is one: most servers have no keys, and it would
take a quarter of the processor time of their start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.access.keyring import Keyring
from tailrace.errors import ModelError, StorageError
from tailrace.models.places import data_path
from tailrace.settings import Settings

if TYPE_CHECKING:
    from tailrace.records.database import RecordDatabase
    from tailrace.records.keys import KeyStore

__all__ = ["Records", "open_database", "open_records"]

logger = logging.getLogger("tailrace.records")

_POLL_S = 0.4  # a revoked key's streams end within a second
_SQLITE = "sqlite:///"


def _url(settings: Settings) -> str:
    directory = Path(settings.data_dir).expanduser() if settings.data_dir else data_path()
    return settings.database or f"{_SQLITE}{directory / 'records.sqlite'}"


def open_database(settings: Settings) -> RecordDatabase:
    """The database that the settings name, with this version's tables. Without a setting it is an SQLite file in the
    data directory. Blocks. Raises: ModelError."""
    from tailrace.records.database import RecordDatabase

    database = RecordDatabase(_url(settings))
    try:
        database.prepare()
    except BaseException:
        database.close()
        raise
    return database


class Records:
    """The keyring of a server, and the store that its keys come from."""

    def __init__(self, settings: Settings) -> None:
        self.keyring = Keyring()
        self._settings = settings
        self._opening = threading.Lock()
        self._database: RecordDatabase | None = None
        self._version = 0  # of the newest change that the keyring has

    def keys(self) -> KeyStore:
        """Blocks, the first time for long. Raises: ModelError."""
        from tailrace.records.keys import KeyStore

        with self._opening:
            if self._database is None:
                self._database = open_database(self._settings)
            return KeyStore(self._database)

    async def read_keys(self) -> None:
        """Take in what has changed since the last time. Raises: ModelError, StorageError."""
        if self._database is None and self._is_absent():
            return
        changed, self._version = await asyncio.to_thread(lambda: self.keys().changed_since(self._version))
        self.keyring.update(changed)

    async def follow_keys(self) -> None:
        """Keep the keyring as the database is, until cancelled. While the database is away, keys stay as they were."""
        is_away = False
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await self.read_keys()
            except (ModelError, StorageError) as error:
                if not is_away:
                    logger.warning("the keys stay as they were: %s", error)
                is_away = True
            else:
                if is_away:
                    logger.warning("the database is back")
                is_away = False

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    def _is_absent(self) -> bool:
        """Whether it would be an SQLite file, and nobody has made one yet."""
        url = _url(self._settings)
        return url.startswith(_SQLITE) and not Path(url.removeprefix(_SQLITE)).exists()


@contextlib.asynccontextmanager
async def open_records(settings: Settings) -> AsyncIterator[Records]:
    """A server's records, which follow the database. A server whose keys cannot be read does not start.

    Raises: ModelError.
    """
    records = Records(settings)
    try:
        try:
            await records.read_keys()
        except StorageError as error:
            raise ModelError(error.message) from None
        async with asyncio.TaskGroup() as group:
            following = group.create_task(records.follow_keys())
            try:
                yield records
            finally:
                following.cancel()
    finally:
        records.close()
