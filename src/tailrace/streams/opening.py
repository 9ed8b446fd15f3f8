"""Opens the log store that the settings name."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol, cast

from tailrace.settings import Settings
from tailrace.streams.log_store import LogStore
from tailrace.streams.memory_store import MemoryLogStore
from tailrace.streams.notes import LocalNotes, SharedLog
from tailrace.streams.old_journals import lifetime_s
from tailrace.streams.rows import read_key
from tailrace.streams.sqlite_store import open_sqlite
from tailrace.types import Payload

__all__ = ["Store", "for_apps", "open_log_store"]


class Store(LogStore, Protocol):
    """A log store that keeps notes of extensions (`notes.py`), too."""

    async def notes_of(self, name: str) -> LocalNotes | SharedLog:
        """Return what an extension keeps, by its name."""


class _Open(Protocol):
    def __call__(
        self, settings: Settings, *, key: bytes | None, of_apps: bool
    ) -> AbstractAsyncContextManager[Store]: ...


@contextlib.asynccontextmanager
async def open_log_store(settings: Settings, path: Path, *, of_apps: bool = False) -> AsyncIterator[Store]:
    """Open the log store that the settings name, of the streams of models or `of_apps`; where servers share it, these
    are apart. Raises: ModelError if it cannot be opened."""
    key = read_key(Path(settings.journal_key_file)) if settings.journal_key_file else None
    if settings.shared_store is not None:
        opens: _Open = resolve_name(settings.shared_store.opens)
        async with opens(settings, key=key, of_apps=of_apps) as shared:
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
        key=key,
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
