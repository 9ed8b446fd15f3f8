"""An owner is forgotten: their keys, streams, conversations and records are deleted."""

from __future__ import annotations

import asyncio
import contextlib

from tailrace.access.keys import Key, check_owner
from tailrace.dialects.durable import owned_key
from tailrace.durable.store import DurableStore
from tailrace.errors import StreamError
from tailrace.records.service import Records
from tailrace.streams import LogStore

__all__ = ["Forgetting"]

_SEEN_S = 1.0  # by then other servers over the database have seen that a key was revoked


class Forgetting:
    """Deletes what this server and its database have of an owner. Streams of other servers end with their keys, and go
    when their time is over."""

    def __init__(self, records: Records, streams: LogStore, durable: DurableStore) -> None:
        self._records = records
        self._streams = streams
        self._durable = durable

    async def forget(self, owner: str) -> dict[str, int]:
        """Returns how many there were of each kind. May be repeated, and goes on where it failed.

        Raises: ValueError for an owner that cannot be; StorageError, ModelError, Draining if something could not be
        deleted.
        """
        check_owner(owner)
        revoked = await self._records.threads.run(lambda: self._revoke(owner))
        self._records.keyring.update(revoked)
        num_streams = 0
        for stream_id in self._streams.streams_of(owner):
            with contextlib.suppress(StreamError):  # it has expired meanwhile
                await self._streams.stop(owner, stream_id)
                await self._streams.delete(owner, stream_id)
                num_streams += 1
        num_durable = self._durable.delete_below(owned_key(owner, b""))
        await asyncio.sleep(_SEEN_S)
        return {
            "streams": num_streams,
            "durable_streams": num_durable,
            **await self._records.forget(owner),
        }

    def _revoke(self, owner: str) -> list[Key]:
        """Blocks. Raises: StorageError, ModelError."""
        store = self._records.keys()
        return [store.revoke(key.key_id) for key in store.list(owner)]
