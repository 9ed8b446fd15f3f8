"""The URLs of --journal that name a Redis, for the entry point of this store.

Rule: it imports little, and not the library of Redis, which is not installed everywhere.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from tailrace.extensions import SharedStoreKind

if TYPE_CHECKING:
    from tailrace.settings import Settings
    from tailrace_outer.redis_streams.redis_store import RedisLogStore

__all__ = ["REDIS", "open_store"]

REDIS = SharedStoreKind("redis", ("redis", "rediss", "redis+sentinel", "rediss+sentinel"), f"{__name__}:open_store")


def open_store(settings: Settings, *, key: bytes | None, of_apps: bool) -> AbstractAsyncContextManager[RedisLogStore]:
    """Open the store of --journal. Raises: ModelError if the client library is not installed."""
    from tailrace.errors import ModelError
    from tailrace.packages.requirements import install_command

    try:
        from tailrace_outer.redis_streams.redis_store import open_redis
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "redis":
            raise
        command = install_command(extra="redis")
        raise ModelError(f"A Redis in --journal needs the package redis. Install it: {command}") from None
    return open_redis(
        settings.journal,
        of_apps=of_apps,
        lease_s=settings.lease_s,
        retention_s=settings.retention_s,
        budget_bytes=settings.retention_bytes,
        key=key,
        keep_finished=settings.keep_finished,
        give_up_after_s=settings.journal_wait_s,
    )
