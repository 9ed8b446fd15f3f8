"""Opens the log store that the settings name."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from tailrace.errors import ModelError
from tailrace.packages.requirements import install_command
from tailrace.settings import Settings
from tailrace.streams._rows import read_key
from tailrace.streams.log_store import LogStore
from tailrace.streams.memory_store import MemoryLogStore
from tailrace.streams.old_journals import lifetime_s
from tailrace.streams.sqlite_store import SqliteLogStore, open_sqlite
from tailrace.types import Payload

if TYPE_CHECKING:  # the library is not installed everywhere
    from tailrace.streams.redis import RedisLogStore

__all__ = ["Store", "for_apps", "open_log_store"]

Store: TypeAlias = "MemoryLogStore | SqliteLogStore | RedisLogStore"
"""A log store that keeps notes of extensions (`notes.py`), too: `notes_of(name)`."""


@contextlib.asynccontextmanager
async def open_log_store(settings: Settings, path: Path, *, of_apps: bool = False) -> AsyncIterator[Store]:
    """Open the log store that the settings name, of the streams of models or `of_apps`; where servers share it, these
    are apart. Raises: ModelError if it cannot be opened."""
    key = read_key(Path(settings.journal_key_file)) if settings.journal_key_file else None
    if settings.shares_streams:
        async with _import_open_redis()(
            settings.journal,
            of_apps=of_apps,
            lease_s=settings.lease_s,
            retention_s=settings.retention_s,
            budget_bytes=settings.retention_bytes,
            key=key,
            keep_finished=settings.keep_finished,
            give_up_after_s=settings.journal_wait_s,
        ) as shared:
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


def _import_open_redis() -> Callable[..., AbstractAsyncContextManager[RedisLogStore]]:
    """Return `open_redis`. Raises: ModelError if the client library is not installed."""
    try:
        from tailrace.streams.redis import open_redis
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "redis":
            raise
        command = install_command(extra="redis")
        raise ModelError(f"A Redis in --journal needs the package redis. Install it: {command}") from None
    return open_redis
