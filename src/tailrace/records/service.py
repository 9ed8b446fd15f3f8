"""A server's records. Nothing of the database is imported before there is one: most servers have no keys, and it would
take a quarter of the processor time of their start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tailrace.access.keyring import Keyring
from tailrace.errors import ModelError, StorageError
from tailrace.generation.service import Service
from tailrace.models.places import data_path
from tailrace.records.keeper import ConversationKeeper
from tailrace.records.threads import DatabaseThreads
from tailrace.settings import Settings

if TYPE_CHECKING:
    from tailrace.records.conversations import ConversationStore
    from tailrace.records.database import RecordDatabase
    from tailrace.records.kept_streams import KeptStreams
    from tailrace.records.keys import KeyStore
    from tailrace.records.request_log import RequestLog
    from tailrace.records.requests import RequestStore
    from tailrace.records.sessions import SessionStore

__all__ = ["Records", "open_database", "open_records"]

_Store = TypeVar("_Store")
_Result = TypeVar("_Result")

logger = logging.getLogger("tailrace.records")

_THREADS = 4
_DRAIN_S = 0.5
_PATIENCE_S = 5.0  # at the end, with a database that does not answer
_TIDY_S = 3600.0
_DAY_S = 86_400.0
_SPOOL = "records"  # in a server's data directory
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
    """The database of a server: its keyring follows it, and requests are recorded in it. Conversations are kept
    there.

    Where nobody made a database, requests are not recorded: it is made by the first key, the first
    conversation, or by --database.
    """

    def __init__(self, settings: Settings) -> None:
        self.keyring = Keyring()
        self.conversations = ConversationKeeper(self._conversations, self._kept_streams, self._keeps_responses)
        self._settings = settings
        self.threads = DatabaseThreads(_THREADS)
        self._opening = threading.Lock()
        self._database: RecordDatabase | None = None
        self._version = 0  # of the newest change that the keyring has
        self._recorded: tuple[Service, Path] | None = None  # whose requests are recorded, and where they wait for it
        self._log: RequestLog | None = None
        self._beginning = asyncio.Lock()
        self._tidied_s = -math.inf

    def keys(self) -> KeyStore:
        """Blocks, the first time for long. Raises: ModelError."""
        from tailrace.records.keys import KeyStore

        return KeyStore(self._opened())

    def sessions(self) -> SessionStore:
        """Blocks, the first time for long. Raises: ModelError."""
        from tailrace.records.sessions import SessionStore

        return SessionStore(self._opened())

    def requests(self) -> RequestStore:
        """Blocks, the first time for long. Raises: ModelError."""
        from tailrace.records.requests import RequestStore

        return RequestStore(self._opened())

    def _conversations(self) -> ConversationStore:
        """Blocks, the first time for long. Raises: ModelError."""
        from tailrace.records.conversations import ConversationStore

        return ConversationStore(self._opened())

    def _kept_streams(self) -> KeptStreams:
        """Blocks, the first time for long. Raises: ModelError."""
        from tailrace.records.kept_streams import KeptStreams

        return KeptStreams(self._opened())

    def _keeps_responses(self) -> bool:
        """Where nobody made a database, none is made for responses; and what is sealed in the journal is not written
        open into the database."""
        return not self._settings.journal_key_file and (self._database is not None or not self.is_absent())

    async def ask(self, open_it: Callable[[], _Store], call: Callable[[_Store], _Result]) -> _Result:
        """Ask one of the stores, beside the event loop. Raises: what the call raises; StorageError."""
        try:
            return await self.threads.run(lambda: call(open_it()))
        except ModelError as error:
            raise StorageError(error.message) from None

    def _opened(self) -> RecordDatabase:
        with self._opening:
            if self._database is None:
                self._database = open_database(self._settings)
            return self._database

    async def read_keys(self) -> None:
        """Take in what has changed since the last time. Raises: ModelError, StorageError."""
        if self._database is None and self.is_absent():
            return
        changes = await self.threads.run(lambda: self.keys().changed_since(self._version))
        await self._record()  # first: what is asked for with a new key is recorded, and counts
        self.keyring.update(changes.keys, changes.owners)
        self.keyring.sessions.update(changes.sessions, time.time())
        self._version = changes.version

    async def follow_keys(self) -> None:
        """Keep the keyring as the database is, until cancelled. While the database is away, keys stay as they were."""
        is_away = False
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await self.read_keys()
            except (ModelError, StorageError, OSError) as error:
                if not is_away:
                    logger.warning("the keys stay as they were: %s", error)
                is_away = True
            else:
                if is_away:
                    logger.warning("the database is back")
                is_away = False

    @contextlib.asynccontextmanager
    async def recording(self, service: Service, data_path: Path) -> AsyncIterator[None]:
        """Record the requests of a server as soon as there is a database, and the turns that an earlier one left. Rows
        wait for it in `data_path`.

        Raises: ModelError if what an earlier server left cannot be taken over.
        """
        running = [run.record for served in service.models for run in served.generator.live]
        self.conversations.take_up(running, has_past=not self.is_absent())
        self._recorded = service, data_path
        if self._database is not None:
            try:
                await self._record()
            except StorageError as error:
                raise ModelError(error.message) from None
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            draining = group.create_task(self._drain(stopping))
            try:
                yield
            finally:
                stopping.set()
                await asyncio.wait([draining], timeout=_PATIENCE_S)
                draining.cancel()  # what is left waits in its file for the next server

    async def _record(self) -> None:
        """Begin to record, if it has not begun. Raises: StorageError, ModelError."""
        async with self._beginning:
            if self._recorded is None or self._log is not None:
                return
            from tailrace.records.request_log import RequestLog
            from tailrace.records.spool import Spool

            service, data_path = self._recorded
            log = RequestLog(
                Spool(data_path / _SPOOL),
                self.keyring.quotas,
                self.requests,
                self.threads,
                with_text=self._settings.record_text,
            )
            await log.begin([served.generator for served in service.models], service.store)
            self._log = log

    async def _drain(self, stopping: asyncio.Event) -> None:
        """Bring rows into the database as they come, and the last ones when the server stops."""
        try:
            while not stopping.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), _DRAIN_S)
                if self._log is not None:
                    await self._log.drain()
                    await self._delete_old()
        finally:
            if self._log is not None:
                self._log.close()

    async def forget(self, owner: str) -> dict[str, int]:
        """Delete all that the database has of an owner, whose keys were revoked and whose streams have ended; returns
        how many there were of each kind. Raises: StorageError, ModelError."""
        await self.conversations.finish()
        if self._log is not None:
            await self._log.forget(owner)

        def delete() -> dict[str, int]:
            return {
                "conversations": self._conversations().forget(owner),
                "requests": self.requests().forget(owner),
                "keys": self.keys().forget(owner),
            }

        return await self.threads.run(delete, within_s=None)

    async def _delete_old(self) -> None:
        """Delete rows that are older than they should be, now and then."""
        if time.monotonic() - self._tidied_s < _TIDY_S:
            return
        self._tidied_s = time.monotonic()
        with contextlib.suppress(StorageError, ModelError, OSError):  # as without descriptors; next time, then
            await self.threads.run(self._delete_rows, within_s=None)

    def _delete_rows(self) -> None:
        now_s = time.time()
        if days := self._settings.record_days:
            self.requests().delete_before(now_s - days * _DAY_S)
        if days := self._settings.response_days:
            self._kept_streams().delete_before(now_s - days * _DAY_S)

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    def is_absent(self) -> bool:
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
            tasks = [
                group.create_task(records.follow_keys()),
                group.create_task(records.conversations.keep()),
            ]
            try:
                yield records
            finally:
                for task in tasks:
                    task.cancel()
    finally:
        records.close()
