"""Deletes an owner: the keys, streams, conversations and records."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tailrace.access.keys import check_owner
from tailrace.access.quota import NO_LIMITS
from tailrace.api.admin_routes import RecentErrors
from tailrace.errors import StreamError
from tailrace.records.service import Records
from tailrace.server import Opened
from tailrace.streams import LogStore

__all__ = ["OwnerDeletion"]


class OwnerDeletion:
    """Deletes an owner from this server and its database. On other servers, streams end with their keys, and are
    deleted after their retention; the database takes nothing about the owner from them any more."""

    def __init__(self, records: Records, streams: LogStore, extensions: Sequence[Opened], errors: RecentErrors) -> None:
        self._records = records
        self._streams = streams
        self._extensions = extensions
        self._errors = errors

    async def delete(self, owner: str) -> dict[str, int]:
        """Return how many objects of each kind were deleted. After an error it can be called again, and continues.

        Raises: ValueError for an invalid owner; StorageError, ModelError, Draining if something could not be deleted.
        """
        check_owner(owner)
        await self._records.threads.run(lambda: self._revoke(owner))
        await self._records.read_keys()
        num_streams = 0
        for stream_id in await self._streams.streams_of(owner):
            with contextlib.suppress(StreamError):  # it may expire meanwhile
                await self._streams.stop(owner, stream_id)
                await self._streams.delete(owner, stream_id)
                num_streams += 1
        counts = {"streams": num_streams}
        for extension in self._extensions:
            counts.update(await extension.forget(owner))
        self._errors.forget(owner)
        return counts | await self._records.forget(owner)

    def _revoke(self, owner: str) -> None:
        """Blocks. Raises: StorageError, ModelError."""
        store = self._records.keys()
        store.limit_owner(owner, NO_LIMITS)  # a later owner of this name has no limits on running servers either
        for key in store.list(owner):
            store.revoke(key.key_id)
