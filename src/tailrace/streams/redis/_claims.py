"""Idempotency keys: which stream each of them began."""

from __future__ import annotations

import asyncio
import time

import msgspec

from tailrace.errors import ClaimTaken, IdempotencyConflict
from tailrace.streams.log import Claim, Record
from tailrace.streams.redis._connection import Connection
from tailrace.streams.redis._scripts import RECALL

__all__ = ["Claims"]

_UNUSED_MS = 60_000  # lifetime of a key whose stream is not stored yet
_WAIT_S = 2.0  # for another server to store the stream of a key


class _Row(msgspec.Struct, array_like=True):
    fingerprint: bytes
    stream_id: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Row).decode


class Claims:
    """A key is taken before its stream is stored, so two servers cannot begin a stream with one key."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._keys = connection.keys

    async def find(self, owner: str, claim: Claim) -> str | None:
        """Return the id of the stream that the key began. It may be gone, or not be stored yet.

        Raises: IdempotencyConflict if the key came with another request, StorageError.
        """
        row = await self._connection.ask(self._connection.client.get(self._keys.claim(owner, claim.key)))
        if row is None:
            return None
        kept = _decode(row)
        if kept.fingerprint != claim.fingerprint:
            raise IdempotencyConflict("This Idempotency-Key was used for another request.", param="idempotency-key")
        return kept.stream_id

    async def recall(self, stream_id: str, epoch: int) -> bool:
        """Return whether Redis has the stream, and mark it as recalled by the server `epoch`. The mark keeps the
        stream's own server from deleting it if its opening got no answer. Raises: StorageError."""
        return bool(await self._connection.run(RECALL, self._keys.of_stream(stream_id), epoch))

    async def take(self, record: Record, claim: Claim) -> None:
        """Take the key for a new stream. Raises: ClaimTaken if another server has a stream of it, StorageError."""
        client, ask, key = self._connection.client, self._connection.ask, self._keys.claim(record.owner, claim.key)
        row = _encode(_Row(claim.fingerprint, record.stream_id))
        until_s = time.monotonic() + _WAIT_S
        while not await ask(client.set(key, row, nx=True, px=_UNUSED_MS)):
            present = await ask(client.get(key))
            if present is None:
                continue
            stream_id = _decode(present).stream_id
            if stream_id == record.stream_id:  # taken before, and the answer was lost
                return
            if await ask(client.exists(self._keys.stream(stream_id))):
                raise ClaimTaken("Another server began a stream with this Idempotency-Key.")
            # Its stream has expired, or another server stores it now, or that server died before it could.
            if await ask(client.exists(self._keys.gone(stream_id))) or time.monotonic() > until_s:
                await ask(client.set(key, row, px=_UNUSED_MS))
                return
            await asyncio.sleep(0.05)

    async def keep(self, record: Record, *, lifetime_s: float | None = None) -> None:
        """Keep the key of a stored stream: as long as the stream runs, or for `lifetime_s`. Raises: StorageError."""
        if record.claim is None:
            return
        client, key = self._connection.client, self._keys.claim(record.owner, record.claim.key)
        if lifetime_s is None:
            await self._connection.ask(client.persist(key))
        else:
            await self._connection.ask(client.pexpire(key, max(1, int(1000 * lifetime_s))))
