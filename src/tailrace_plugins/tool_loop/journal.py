"""Where responses with MCP tools are kept: the rows of a table, on this machine or in a Redis that servers share.

A response is a row with its beginning, and one for each step that followed. Whoever has the lease of the first row goes
on with the response, and writes each step with this lease.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Collection, Sequence

import msgspec

from tailrace.errors import JournalDamaged, RequestError
from tailrace.server import Table, row_key
from tailrace_plugins.tool_loop.kept import KeptLoop, rows_until_end
from tailrace_plugins.tool_loop.loop_keys import (
    BEGUN,
    CANCELLED,
    CLAIMS,
    KINDS,
    OPEN,
    READ,
    STEPS,
    USED,
)
from tailrace_plugins.tool_loop.loop_rows import Begun, Needs, Planned

__all__ = ["LOOP_ID", "Journal", "new_loop_id"]

LOOP_ID = re.compile(r"mcp_[0-9a-f]{32}")
_ID_LENGTH = 36
_TIME_DIGITS = 8
_LISTED_AT_ONCE = 500  # keys
_ERASED_AT_ONCE = 64  # rows
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Begun).decode
_decode_needs = msgspec.msgpack.Decoder(Needs).decode


def new_loop_id() -> str:
    """Return the id of a new response, which begins with its time."""
    return f"mcp_{int(time.time()):0{_TIME_DIGITS}x}{secrets.token_hex(12)}"


class Journal:
    """Reads and writes responses. Methods raise StorageError."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._server_id = secrets.token_hex(8)  # under which this server reads responses of others

    @property
    def is_shared(self) -> bool:
        return self.table.is_shared

    async def begin(self, begun: Begun, claim: bytes, needs: Needs) -> KeptLoop | None:
        """Keep a new response, with the approvals that it uses and the digest of its body for its Idempotency-Key.
        None: another server has just begun one with its key, or with such an approval.

        Raises: RequestError, StorageError.
        """
        owner, loop_id = begun.sender.owner, begun.loop_id
        key = row_key(BEGUN, owner, loop_id)
        try:
            first = {key: _encode(begun)}
        except OverflowError:
            raise RequestError("An integer in this request is too large.", param="tools") from None
        used = {_used_key(owner, call, call.after): loop_id.encode() for call in begun.decided if call.known is None}
        if begun.claim:
            used[_claim_key(owner, begun.claim)] = loop_id.encode() + claim
        await self.table.change(first)
        lease = await self.table.take(key)  # before others can know of it
        kept = KeptLoop(self.table, begun)
        rows = {row_key(OPEN, owner, loop_id): _encode(needs), **used}
        if lease is None or not await self.table.change(rows, lease=lease, absent=used):
            await self.table.change({}, [key])
            return None
        kept.take(lease)
        return kept

    async def load(self, owner: str, loop_id: str) -> KeptLoop | None:
        """Return a response; None if there is none, or it is damaged."""
        (row,) = await self.table.get(row_key(BEGUN, owner, loop_id))
        if row is None:
            return None
        kept = KeptLoop(self.table, _decode(row))
        try:
            await kept.refresh()
        except JournalDamaged:
            return None
        return kept

    async def take(self, kept: KeptLoop) -> bool:
        """Let this server go on with a response, if no other one does that lives. Raises: JournalDamaged, too."""
        lease = await self.table.take(row_key(BEGUN, kept.begun.sender.owner, kept.begun.loop_id))
        if lease is None:
            return False
        await kept.refresh()
        kept.take(lease)
        return True

    async def is_held(self, owner: str, loop_id: str) -> bool:
        """Return whether a server that lives goes on with a response."""
        return await self.table.is_held(row_key(BEGUN, owner, loop_id))

    async def unfinished(self) -> dict[str, Needs]:
        """Return what the responses need that have not ended, by their ids."""
        keys = await self._keys(OPEN + b"/")
        rows = await self.table.get(*keys)
        return {_name(key): _decode_needs(row) for key, row in zip(keys, rows, strict=True) if row is not None}

    async def needs_of(self, owner: str, loop_id: str) -> Needs | None:
        """Return what a response needs; None if it has ended."""
        (row,) = await self.table.get(row_key(OPEN, owner, loop_id))
        return _decode_needs(row) if row is not None else None

    # What other servers should know

    async def mark_cancelled(self, begun: Begun) -> None:
        """Let the server that goes on with a response cancel it."""
        owner, loop_id = begun.sender.owner, begun.loop_id
        cancelled = row_key(CANCELLED, owner, loop_id)
        await self.table.change({cancelled: b"1"})
        if await self.needs_of(owner, loop_id) is None:  # it has ended, so nothing else erases this
            await self.table.change({}, [cancelled])

    async def are_cancelled(self, loops: Sequence[tuple[str, str]]) -> set[str]:
        """Return the ids of the responses that a client has cancelled, of these. They are given with their owners."""
        rows = await self.table.get(*(row_key(CANCELLED, owner, loop_id) for owner, loop_id in loops))
        return {loop_id for (_, loop_id), row in zip(loops, rows, strict=True) if row is not None}

    async def begin_reading(self, begun: Begun) -> None:
        """A response of another server has readers here, until `end_reading`, or as long as this server lives."""
        key = self._reading_key(begun)
        await self.table.change({key: b"1"})
        while await self.table.take(key) is None:  # another server takes it for that of a dead one, and erases it
            await self.table.change({key: b"1"})
        if await self.needs_of(begun.sender.owner, begun.loop_id) is None:  # as above
            await self.table.change({}, [key])

    async def end_reading(self, begun: Begun) -> None:
        await self.table.change({}, [self._reading_key(begun)])

    async def is_read(self, begun: Begun) -> bool:
        """Return whether another server that lives has readers of a response. It erases what dead ones have left, and
        what this one has left that read the response before it went on with it."""
        found = await self.table.sizes(row_key(READ, begun.sender.owner, begun.loop_id) + b"/", most=_ERASED_AT_ONCE)
        for key in found:
            if await self.table.take(key) is None:
                return True
            await self.table.change({}, [key])
        return False

    def _reading_key(self, begun: Begun) -> bytes:
        return row_key(READ, begun.sender.owner, f"{begun.loop_id}/{self._server_id}")

    # What was used

    async def used_by(self, owner: str, call: Planned) -> str | None:
        """Return the id of the response that has used the approval of a call last."""
        last = ""
        while (row := (await self.table.get(_used_key(owner, call, last)))[0]) is not None:
            last = row.decode()
        return last or None

    async def claimed(self, owner: str, claim: str) -> tuple[str, bytes] | None:
        """Return the response of an Idempotency-Key, and the digest of its body."""
        (found,) = await self.table.get(_claim_key(owner, claim))
        return (found[:_ID_LENGTH].decode(), found[_ID_LENGTH:]) if found is not None else None

    # Deleting

    async def delete(self, begun: Begun) -> None:
        """Forget a response, but not that its approvals are used: those go with the response that asked for them."""
        owner, loop_id = begun.sender.owner, begun.loop_id
        claimed = await self.claimed(owner, begun.claim) if begun.claim else None
        is_its_own = claimed is not None and claimed[0] == loop_id  # not so if its server died as it began
        await self._delete(owner, loop_id, [_claim_key(owner, begun.claim)] if is_its_own else [])

    async def _delete(self, owner: str, loop_id: str, claims: Collection[bytes] = ()) -> None:
        first = [row_key(kind, owner, loop_id) for kind in (BEGUN, OPEN, CANCELLED)]
        await self.table.change({}, [*first, *claims])  # from then on no server adds to it
        for prefix in (
            row_key(STEPS, owner, f"{loop_id}/"),
            row_key(READ, owner, f"{loop_id}/"),
            row_key(USED, owner, loop_id.removeprefix("mcp_")),
        ):
            await self._erase(prefix)

    async def delete_id(self, owner: str, loop_id: str) -> None:
        """Forget a response, which may be damaged."""
        (row,) = await self.table.get(row_key(BEGUN, owner, loop_id))
        if row is not None:
            await self.delete(_decode(row))
        else:
            await self._delete(owner, loop_id)

    async def close_damaged(self, owner: str, loop_id: str) -> bool:
        """Let no server look any more for a response that cannot be read, if none that lives goes on with it. Returns
        whether it is so now. Its Idempotency-Key stays until it expires: a repeated request must not make its calls
        again. Raises: LeaseLost, StorageError."""
        lease = await self.table.take(row_key(BEGUN, owner, loop_id))
        if lease is None:
            return False
        await self.table.change({}, await rows_until_end(self.table, owner, loop_id), lease=lease)
        return True

    async def forget(self, owner: str) -> int:
        """Forget all that an owner has. Returns how many responses there were."""
        num_loops = len(await self.of(owner))
        for kind in KINDS:
            await self._erase(row_key(kind, owner))
        return num_loops

    async def of(self, owner: str) -> list[str]:
        """Return the ids of an owner's responses, the oldest first."""
        return [_name(key) for key in await self._keys(row_key(BEGUN, owner))]

    async def delete_older(self, time_s: float, live: Collection[str]) -> None:
        """Forget the responses that began before a time, except those that run here (`live`) or at a server that
        lives."""
        keys = [key for key in await self._keys(BEGUN + b"/") if _begun_s(_name(key)) < time_s]
        for key in keys:
            (row,) = await self.table.get(key)
            begun = _decode(row) if row is not None else None
            if begun is None:
                await self.table.change({}, [key])
            elif begun.loop_id not in live and not await self._runs_elsewhere(begun):
                await self.delete(begun)

    async def _runs_elsewhere(self, begun: Begun) -> bool:
        owner, loop_id = begun.sender.owner, begun.loop_id
        return await self.needs_of(owner, loop_id) is not None and self.is_shared and await self.is_held(owner, loop_id)

    async def _keys(self, prefix: bytes) -> list[bytes]:
        found: list[bytes] = []
        while page := await self.table.sizes(prefix, after=found[-1] if found else None, most=_LISTED_AT_ONCE):
            found += page
        return found

    async def _erase(self, prefix: bytes) -> None:
        while page := await self.table.sizes(prefix, most=_ERASED_AT_ONCE):
            await self.table.change({}, page)


def _name(key: bytes) -> str:
    return key.rpartition(b"/")[2].decode()


def _begun_s(loop_id: str) -> int:
    return int(loop_id.removeprefix("mcp_")[:_TIME_DIGITS], 16)


def _used_key(owner: str, call: Planned, after: str) -> bytes:
    """Return a key that begins with the id of the response that asked for the approval. A response that was the second
    to use it, `after` one that made no call, has another key: of two such responses, only one begins."""
    return row_key(USED, owner, f"{(call.approval_id or '').removeprefix('mcpr_')}/{after}")


def _claim_key(owner: str, claim: str) -> bytes:
    return row_key(CLAIMS, owner, hashlib.sha256(claim.encode()).hexdigest())
