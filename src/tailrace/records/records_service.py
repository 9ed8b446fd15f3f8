"""A server's records. The database library is imported only when there is a database: most servers have none, and the
import would take a quarter of the CPU time of their start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tailrace.access.authentication import Authentication
from tailrace.access.keyring import Keyring
from tailrace.access.quotas import Quotas
from tailrace.access.sessions import Sessions
from tailrace.access.shares import Shares
from tailrace.errors import ModelError, StorageError
from tailrace.generation import Observers
from tailrace.models.directories import data_path, expanded
from tailrace.records.conversation_keeper import ConversationKeeper
from tailrace.records.threads import DatabaseThreads
from tailrace.settings import Settings
from tailrace.streams import LogStore
from tailrace.types import Record

if TYPE_CHECKING:
    from tailrace.records.conversation_store import ConversationStore
    from tailrace.records.kept_images import KeptImages
    from tailrace.records.kept_streams import KeptStreams
    from tailrace.records.key_store import KeyStore
    from tailrace.records.record_database import RecordDatabase
    from tailrace.records.request_log import RequestLog
    from tailrace.records.request_store import RequestStore
    from tailrace.records.session_store import SessionStore
    from tailrace.records.share_store import ShareStore

__all__ = ["Records", "absent_database", "has_keys", "open_database", "open_records"]

_Store = TypeVar("_Store")
_Result = TypeVar("_Result")

logger = logging.getLogger("tailrace.records")

_THREADS = 8
_BACKGROUND_THREADS = 3  # for the keys, the rows of requests, and the turns of conversations
_DRAIN_S = 0.5
_SHUTDOWN_TIMEOUT_S = 5.0  # for the last rows at shutdown
_CLEANUP_S = 3600.0
_DAY_S = 86_400.0
_SPOOL = "records"  # in a server's data directory
_POLL_S = 0.4  # so that a revoked key's streams end within a second
MISSED_S = 60.0  # after a longer pause, all keys and sessions are read: ended sessions may be deleted meanwhile
_SQLITE = re.compile(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?", re.DOTALL)  # a file's URL, with its path


def _url(settings: Settings) -> str:
    directory = expanded(settings.data_dir) if settings.data_dir else data_path()
    return settings.database or f"sqlite:///{directory / 'records.sqlite'}"


def absent_database(settings: Settings) -> Path | None:
    """Return the database of the settings if it is an SQLite file that does not exist yet."""
    found = _SQLITE.fullmatch(_url(settings))
    return Path(found[1]) if found is not None and not Path(found[1]).exists() else None


def open_database(settings: Settings) -> RecordDatabase:
    """Open the database of the settings, and migrate its tables. The default is an SQLite file in the data directory.
    Blocks. Raises: ModelError."""
    from tailrace.records.record_database import RecordDatabase

    database = RecordDatabase(_url(settings))
    try:
        database.prepare()
    except BaseException:
        database.close()
        raise
    return database


def has_keys(settings: Settings) -> bool:
    """Return whether the database of the settings has keys. Creates and migrates nothing: a server with a database
    records its requests. Blocks. Raises: ModelError."""
    from tailrace.records.record_database import RecordDatabase

    if absent_database(settings) is not None:
        return False
    with contextlib.closing(RecordDatabase(_url(settings))) as database:
        return database.has_keys()


class Records:
    """The database of a server. The keyring, the quotas and the active sessions follow its keys; requests and
    conversations are written to it.

    Without a database, requests are not recorded. The first key, the first conversation, or --database creates it.
    """

    def __init__(self, settings: Settings) -> None:
        self.keyring = Keyring()
        self.quotas = Quotas()
        self.active_sessions = Sessions()
        self.shares = Shares(self.keyring)
        self.authentication = Authentication(self.keyring, self.active_sessions)
        self.threads = DatabaseThreads(_THREADS)  # for clients
        self._background = DatabaseThreads(_BACKGROUND_THREADS)  # so that clients cannot delay a revocation
        self.conversations = ConversationKeeper(
            self._conversations,
            self._kept_streams,
            self._kept_images,
            self._keeps_responses,
            bool(settings.kept_image_bytes) and not settings.journal_key_file,
            self._record_soon,
            self.threads,
            self._background,
        )
        self._settings = settings
        self._opening = threading.Lock()
        self._database: RecordDatabase | None = None
        self._version = 0  # the keyring has all changes up to it
        self._read_s = -math.inf  # when the changes were last read, on the monotonic clock
        self._reading = asyncio.Lock()
        self._recorded: tuple[Observers, Callable[[], Iterable[Record]], LogStore, Path] | None = None  # of `recording`
        self.request_log: RequestLog | None = None  # None until requests are recorded
        self._start_lock = asyncio.Lock()
        self._cleaned_up_s = -math.inf

    def use(self, settings: Settings) -> None:
        """Use other settings from now on."""
        self._settings = settings

    def keys(self) -> KeyStore:
        """Blocks, the first time for long. Raises: ModelError."""
        from tailrace.records.key_store import KeyStore

        return KeyStore(self._opened())

    def sessions(self) -> SessionStore:
        """Blocks, the first time for long. Raises: ModelError."""
        from tailrace.records.session_store import SessionStore

        return SessionStore(self._opened())

    def links(self) -> ShareStore:
        """Blocks, the first time for long. Raises: ModelError."""
        from tailrace.records.share_store import ShareStore

        return ShareStore(self._opened())

    def requests(self) -> RequestStore:
        """Blocks, the first time for long. Raises: ModelError."""
        from tailrace.records.request_store import RequestStore

        return RequestStore(self._opened())

    def _conversations(self) -> ConversationStore:
        """Blocks, the first time for long. Raises: ModelError."""
        from tailrace.records.conversation_store import ConversationStore

        return ConversationStore(self._opened(), self._settings.kept_image_bytes)

    def _kept_streams(self) -> KeptStreams:
        """Blocks, the first time for long. Raises: ModelError."""
        from tailrace.records.kept_streams import KeptStreams

        return KeptStreams(self._opened())

    def _kept_images(self) -> KeptImages:
        """Blocks, the first time for long. Raises: ModelError."""
        from tailrace.records.kept_images import KeptImages

        return KeptImages(self._opened(), self._settings.kept_image_bytes)

    def _keeps_responses(self) -> bool:
        """Return whether responses are stored. They do not create a database by themselves, and texts that are
        encrypted in the journal are not written to the database as plain text."""
        return not self._settings.journal_key_file and (self._database is not None or not self.is_absent())

    async def ask(self, open_store: Callable[[], _Store], call: Callable[[_Store], _Result]) -> _Result:
        """Run a call on one of the stores in a thread. Raises: what the call raises; StorageError."""
        try:
            return await self.threads.run(lambda: call(open_store()))
        except ModelError as error:
            raise StorageError(error.message) from None

    def _opened(self) -> RecordDatabase:
        with self._opening:
            if self._database is None:
                self._database = open_database(self._settings)
            return self._database

    async def read_keys(self) -> None:
        """Load the keys that have changed since the last call. Raises: ModelError, StorageError."""
        if self._database is None and self.is_absent():
            self.keyring.is_unknown = False
            return
        async with self._reading:  # an older state must not replace a newer one
            begun_s = time.monotonic()
            is_whole = begun_s - self._read_s > MISSED_S
            try:
                changes = await self._background.run(
                    lambda: self.keys().changed_since(0 if is_whole else self._version)
                )
            except BaseException:
                # A database that is there and was never read may have keys: nobody gets in without one.
                self.keyring.is_unknown = self._read_s == -math.inf
                raise
            self.keyring.is_unknown = False
            await self._record()  # before the update, so that requests with a new key are recorded and counted
            self.quotas.update(changes.keys, changes.owners)
            self.keyring.update(changes.keys)
            self.active_sessions.update(changes.sessions, time.time(), is_whole=is_whole)
            self.shares.update(changes.shares, time.time(), is_whole=is_whole)
            self._version, self._read_s = changes.version, begun_s

    async def apply_own_change(self) -> None:
        """Load a change that this server has just written. If the database is unreachable by now, `follow_keys` does
        it later."""
        with contextlib.suppress(ModelError, StorageError):
            await self.read_keys()

    async def follow_keys(self) -> None:
        """Load changed keys until cancelled. While the database is unreachable, the keyring does not change; if it was
        never read, requests are refused."""
        is_unreachable = False
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await self.read_keys()
            except (ModelError, StorageError, OSError) as error:
                if not is_unreachable:
                    logger.warning("the keys cannot be reloaded: %s", error)
                is_unreachable = True
            else:
                if is_unreachable:
                    logger.warning("the keys can be reloaded again")
                is_unreachable = False

    @contextlib.asynccontextmanager
    async def recording(
        self,
        observers: Observers,
        running: Callable[[], Iterable[Record]],
        store: LogStore[Any],  # Any: streams of apps are not recorded
        data_path: Path,
    ) -> AsyncIterator[None]:
        """Record the requests that these observers hear of and the `running` streams as soon as there is a database,
        and finish the turns of earlier servers. Rows are spooled in `data_path`.

        Raises: ModelError if the rows of an earlier server cannot be taken over.
        """
        self.conversations.queue_earlier_streams(running(), has_past=not self.is_absent())
        self._recorded = observers, running, store, data_path
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
                await asyncio.wait([draining], timeout=_SHUTDOWN_TIMEOUT_S)
                draining.cancel()  # the next server finds the remaining rows in the spool

    async def _record(self) -> None:
        """Start recording, unless it has started. Raises: StorageError, ModelError."""
        async with self._start_lock:
            if self._recorded is None or self.request_log is not None:
                return
            from tailrace.records.request_log import RequestLog
            from tailrace.records.spool import Spool

            observers, running, store, data_path = self._recorded
            log = RequestLog(
                Spool(data_path / _SPOOL),
                self.quotas,
                self.requests,
                self._background,
                self.conversations,
                with_text=self._settings.record_text,
            )
            await log.begin(observers, running(), store)
            self.request_log = log

    async def _record_soon(self) -> None:
        """Start recording, unless it has started. After a failure, `follow_keys` tries again."""
        with contextlib.suppress(StorageError, ModelError, OSError):
            await self._record()

    async def _drain(self, stopping: asyncio.Event) -> None:
        """Drain the spool into the database regularly, and once more when the server stops."""
        try:
            while not stopping.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), _DRAIN_S)
                if self.request_log is not None:
                    await self.request_log.drain()
                    await self._delete_old()
        finally:
            if self.request_log is not None:
                self.request_log.close()

    async def forget(self, owner: str) -> dict[str, int]:
        """Delete all that is kept of an owner. The owner's keys must be revoked, and this server's streams ended.
        Returns the number of deleted rows by kind. Raises: StorageError, ModelError."""
        await self.conversations.finish()
        if self.request_log is not None:
            await self.request_log.forget(owner)

        def delete() -> dict[str, int]:
            num_keys = self.keys().forget(owner)  # first: from now on no server adds anything about the owner
            return {
                "conversations": self._conversations().forget(owner),
                "responses": self._kept_streams().forget(owner),
                "requests": self.requests().forget(owner),
                "links": self.links().forget(owner),
                "keys": num_keys,
            }

        return await self.threads.run(delete, within_s=None)

    async def _delete_old(self) -> None:
        """Delete rows that have exceeded their retention time, once an hour."""
        if time.monotonic() - self._cleaned_up_s < _CLEANUP_S:
            return
        self._cleaned_up_s = time.monotonic()
        with contextlib.suppress(StorageError, ModelError, OSError):
            await self._background.run(self._delete_rows, within_s=None)

    def _delete_rows(self) -> None:
        now_s = time.time()
        if days := self._settings.record_days:
            self.requests().delete_before(now_s - days * _DAY_S)
        if days := self._settings.response_days:
            self._kept_streams().delete_before(now_s - days * _DAY_S)
        self._kept_images().delete_unused()
        self.links().delete_ended()

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    def is_absent(self) -> bool:
        """Return whether the database is an SQLite file that does not exist yet."""
        return absent_database(self._settings) is not None


@contextlib.asynccontextmanager
async def open_records(settings: Settings) -> AsyncIterator[Records]:
    """Open a server's records. Fails if the keys cannot be read, so that such a server does not start.

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
                group.create_task(records.conversations.write_until_cancelled()),
            ]
            try:
                yield records
            finally:
                for task in tasks:
                    task.cancel()
    finally:
        records.close()
