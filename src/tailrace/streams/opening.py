"""Opens the log store that the settings name.

The stores of this package are for one machine. One that many servers share is a `SharedStore` under the entry point
`tailrace.log_stores`, since it needs a client library.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol, cast

from tailrace.errors import ModelError
from tailrace.packages.plugins import load_plugins
from tailrace.packages.requirements import install_command
from tailrace.settings import Settings
from tailrace.streams.log import StreamLog
from tailrace.streams.log_store import LogStore
from tailrace.streams.memory_store import MemoryLogStore
from tailrace.streams.notes import LocalNotes, SharedLog
from tailrace.streams.old_journals import lifetime_s
from tailrace.streams.rows import read_journal_key
from tailrace.streams.sqlite_store import open_sqlite
from tailrace.streams.tables import Table
from tailrace.types import Payload

__all__ = ["SharedStore", "Store", "for_apps", "open_log_store"]

_GROUP = "tailrace.log_stores"  # of entry points
_REDIS = "redis"


class Store(LogStore, Protocol):
    """A log store that has methods for extensions, and keeps their notes (`notes.py`), too."""

    async def drop(self, log: StreamLog) -> None:
        """Delete a finished stream: now, or with others later, which costs less. Raises: as `delete`."""

    async def notes_of(self, name: str) -> LocalNotes | SharedLog:
        """Return what an extension keeps. Raises: StorageError."""

    async def table_of(self, name: str) -> Table:
        """Return the rows that an extension keeps. It uses this or `notes_of`. Raises: StorageError."""


@dataclass(frozen=True, slots=True)
class SharedStore:
    """A log store that many servers share. `opens` names a function, as module:function. It is called with the
    `Settings`, with the `journal_key` that encrypts what is stored, or None, and with `of_apps`; it returns an async
    context manager of a `Store`. Its module may import a library, whose name is `name`."""

    name: str
    opens: str


@contextlib.asynccontextmanager
async def open_log_store(settings: Settings, path: Path, *, of_apps: bool = False) -> AsyncIterator[Store]:
    """Open the log store that the settings name, of the streams of models or `of_apps`; where servers share it, these
    are apart. Raises: ModelError if it cannot be opened."""
    journal_key = read_journal_key(Path(settings.journal_key_file)) if settings.journal_key_file else None
    if settings.shares_streams:
        async with _shared_store()(settings, journal_key=journal_key, of_apps=of_apps) as shared:
            yield shared
        return
    if settings.journal == "memory":
        with contextlib.closing(
            MemoryLogStore(retention_s=settings.retention_s, budget_bytes=settings.retention_bytes)
        ) as store:
            yield store
        return
    async with open_sqlite(
        path,
        retention_s=settings.retention_s,
        budget_bytes=settings.retention_bytes,
        journal_key=journal_key,
        of_apps=of_apps,
        keep_finished=settings.keep_finished,
        lifetime_s=lifetime_s(linger_s=settings.linger_s, retention_s=settings.retention_s),
        sync_s=settings.journal_sync_s,
        give_up_after_s=settings.journal_wait_s,
    ) as on_disk:
        yield on_disk


def for_apps(store: LogStore) -> LogStore[Payload]:
    """Return a store that keeps the streams of apps, as its users see it. A store treats all events alike except the
    `End`, and its own code has the types of models' streams."""
    return cast("LogStore[Payload]", store)


def _shared_store() -> Callable[..., AbstractAsyncContextManager[Store]]:
    """Return the function that opens the store in Redis. Raises: ModelError if it, or its library, is not installed."""
    found = load_plugins(_GROUP, SharedStore, taken=(), refuses=lambda store, others: "", only=_REDIS).found
    if _REDIS not in found:
        raise ModelError(f"tailrace is not installed completely: no package has the log store {_REDIS}.")
    try:
        opens: Callable[..., AbstractAsyncContextManager[Store]] = resolve_name(found[_REDIS].opens)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != _REDIS:
            raise
        command = install_command(extra=_REDIS)
        raise ModelError(f"A Redis in --journal needs the package redis. Install it: {command}") from None
    return opens
