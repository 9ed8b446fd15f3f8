"""Idempotency keys: which stream each of them began."""

from __future__ import annotations

import asyncio
import time

import msgspec

from tailrace.errors import ClaimTaken, IdempotencyConflict
from tailrace.types import Claim, Record
from tailrace_outer.redis._connection import Connection
from tailrace_outer.redis._patience import CATCH_UP_S, RETRY_S
from tailrace_outer.redis._redis_keys import DAY_MS
from tailrace_outer.redis._scripts import CLAIM, RECALL

__all__ = ["TAKEN", "Claims"]

TAKEN = "Another server began a stream with this Idempotency-Key."

_UNUSED_MS = 60_000  # lifetime of a key whose stream is not stored yet
_TAKEN, _STORED, _ENDED = 1, 2, 3  # the rows of a stream: before it is stored, while it runs, and then
_RUNNING_MS = DAY_MS  # of one whose stream runs: renewed while it does, and gone by itself if nobody can end it


class _Row(msgspec.Struct, array_like=True):
    fingerprint: bytes
    stream_id: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Row).decode


class Claims:
    """A key is taken before its stream is stored, so two servers cannot begin a stream with one key. When the stream is
    stored, the key's row changes: who saw that it was not stored, and replaces that row late, fails."""

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
        stream's own server from deleting it if its opening got no reply. Raises: StorageError."""
        return bool(await self._connection.run(RECALL, self._keys.of_stream(stream_id), epoch))

    async def take(self, record: Record, claim: Claim) -> None:
        """Take the key for a new stream. Raises: ClaimTaken if another server has a stream of it, StorageError."""
        client, ask = self._connection.client, self._connection.ask
        seen, until_s = b"", 0.0
        unused = b""  # the row of a stream that is not there
        while (other := await self._claim(record, claim, _UNUSED_MS, _TAKEN, unused)) is not None:
            if other != seen:
                seen, until_s = other, time.monotonic() + CATCH_UP_S
            stream_id = _decode(other).stream_id
            # First: it may be stored, and end, meanwhile.
            is_gone = await ask(client.exists(self._keys.gone(stream_id)))
            if await ask(client.exists(self._keys.stream(stream_id))):
                raise ClaimTaken(TAKEN)
            # Its stream has expired, or another server stores it now, or that server died before it could.
            if is_gone or time.monotonic() > until_s:
                unused = other
            else:
                await asyncio.sleep(RETRY_S)

    async def keep(self, record: Record) -> bool:
        """Keep the key of a stored stream for a day, which is to be repeated while the stream runs. Returns whether the
        stream has its key: another one may have taken it before the stream was stored. Raises: StorageError."""
        if record.claim is None:
            return True
        return await self._claim(record, record.claim, _RUNNING_MS, _STORED) is None

    async def end(self, record: Record, lifetime_s: float) -> None:
        """Keep the key of a stream that has ended: from the first such call on, for this time. Raises: StorageError."""
        if record.claim is not None:
            await self._claim(record, record.claim, max(1, int(1000 * lifetime_s)), _ENDED)

    async def _claim(
        self, record: Record, claim: Claim, lifetime_ms: int, which: int, unused: bytes = b""
    ) -> bytes | None:
        """Write the row `which` of a stream. Return the row of another one that has the key and is not `unused`.

        Raises: StorageError.
        """
        fields = claim.fingerprint, record.stream_id
        # The second one is as earlier versions write it, which may take the stream over.
        rows = _encode((*fields, False)), _encode(fields), _encode((*fields, True))
        keys = [self._keys.claim(record.owner, claim.key)]
        other: bytes | None = await self._connection.run(CLAIM, keys, *rows, unused, lifetime_ms, which)
        return other
