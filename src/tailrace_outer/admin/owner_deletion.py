"""Deletes an owner: the keys, streams, conversations and records."""

from __future__ import annotations

import contextlib

from tailrace.access.keys import check_owner
from tailrace.access.quota import NO_LIMITS
from tailrace.errors import StreamError
from tailrace.records.records_service import Records
from tailrace.server import Server

__all__ = ["OwnerDeletion"]


class OwnerDeletion:
    """Deletes an owner from this server and its database. On other servers, streams end with their keys, and are
    deleted after their retention; the database takes nothing about the owner from them any more."""

    def __init__(self, server: Server, records: Records) -> None:
        self._server = server
        self._records = records

    async def delete(self, owner: str) -> dict[str, int]:
        """Return how many objects of each kind were deleted. After an error it can be called again, and continues.

        Raises: ValueError for an invalid owner; StorageError, ModelError, Draining if something could not be deleted.
        """
        check_owner(owner)
        await self._records.threads.run(lambda: self._revoke(owner))
        await self._records.read_keys()
        num_streams, streams = 0, self._server.store
        for stream_id in await streams.streams_of(owner):
            with contextlib.suppress(StreamError):  # it may expire meanwhile
                await streams.stop(owner, stream_id)
                await streams.delete(owner, stream_id)
                num_streams += 1
        counts = {"streams": num_streams} | await self._server.forget(owner)
        return counts | await self._records.forget(owner)

    def _revoke(self, owner: str) -> None:
        """Blocks. Raises: StorageError, ModelError."""
        store = self._records.keys()
        store.limit_owner(owner, NO_LIMITS)  # a later owner of this name has no limits on running servers either
        for key in store.list(owner):
            store.revoke(key.key_id)
