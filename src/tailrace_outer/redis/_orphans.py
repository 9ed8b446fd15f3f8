"""Takes streams that nobody writes from Redis: mostly those of dead servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Container, Sequence
from dataclasses import dataclass
from typing import Any

from tailrace.errors import JournalDamaged
from tailrace.streams.rows import Rows
from tailrace.streams.startup_recovery import MAX_RECOVERIES, TOO_MANY_RECOVERIES
from tailrace.types import Event, Failure, Record, Status
from tailrace_outer.redis._connection import Connection
from tailrace_outer.redis._members import Members
from tailrace_outer.redis._scripts import TAKE
from tailrace_outer.redis.stream_states import Recalled, StreamStates

__all__ = ["Orphan", "Orphans"]

logger = logging.getLogger("tailrace.journal")

_AT_ONCE = 32
_LOST = 0  # TAKE's reply about a stream that this server may take as soon as it has a new epoch
_DAMAGED = Failure(JournalDamaged.code, "The rest of this stream was damaged.")
_STOPPED = Failure("cancelled", "The stream was stopped.")


@dataclass(frozen=True, slots=True)
class Orphan:
    """A stream that this server writes now, as the server of this epoch, and that it took from the server of another.
    `end` is how it must end at once, if it cannot go on. One that has its terminal event is only to be tidied up."""

    epoch: int
    former_epoch: int
    record: Record
    events: list[Event]
    end: tuple[Status, Failure] | None = None


class Orphans:
    """Takes streams that dead servers have left, and those of this server that it must continue."""

    def __init__(
        self,
        connection: Connection,
        members: Members,
        rows: Rows,
        streams: StreamStates,
        *,
        retention_s: float,
    ) -> None:
        self._connection = connection
        self._keys = connection.keys
        self._members = members
        self._rows = rows
        self._retention_s = retention_s
        self._streams = streams

    async def take(self, models: Container[str] | None) -> AsyncIterator[Orphan]:
        """Take streams of these models, or of all. Raises: StorageError."""
        for stream_id, recalled in list(self._streams.of(Recalled).items()):
            for orphan in (await self._take_some(self._members.epoch, [stream_id]))[0]:
                yield orphan
            self._streams.leave(stream_id, recalled)
        await self._members.find_dead()
        ask, client = self._connection.ask, self._connection.client
        for epoch in sorted(self._members.dead):
            in_order = await self._members.streams(epoch)
            for start in range(0, len(in_order), _AT_ONCE):
                stream_ids = await self._of_models(epoch, in_order[start : start + _AT_ONCE], models)
                orphans, settled = await self._take_some(epoch, stream_ids)
                for orphan in orphans:
                    yield orphan
                # Last, so that what was taken is found again if Redis fails before it was yielded.
                await asyncio.gather(*(ask(client.zrem(self._keys.of_owned(one, epoch)[3], one)) for one in settled))
            if not await self._members.num_streams(epoch):
                await self._members.forget(epoch)

    async def _of_models(self, epoch: int, stream_ids: list[str], models: Container[str] | None) -> list[str]:
        """Return the streams that this server may take. Raises: StorageError."""
        if models is None or self._members.is_long_dead(epoch, self._retention_s):
            return stream_ids
        ask, client = self._connection.ask, self._connection.client
        of = await asyncio.gather(*(ask(client.hget(self._keys.stream(one), "model")) for one in stream_ids))
        return [one for one, model in zip(stream_ids, of, strict=True) if _is_ours(model, models)]

    async def _take_some(self, epoch: int, stream_ids: list[str]) -> tuple[list[Orphan], list[str]]:
        """Return what was taken, and the ids of all streams that need not be looked at again. Raises: StorageError."""
        own = self._members.epoch
        # Also those that this server writes, or opens once more: a failover may have lost that it took them.
        replies = await asyncio.gather(*(self._take(epoch, own, one) for one in stream_ids))
        taken = [
            self._read(own, epoch, stream_id, *reply)
            for stream_id, reply in zip(stream_ids, replies, strict=True)
            if reply and not self._streams.is_written(stream_id)
        ]
        settled = [one for one, reply in zip(stream_ids, replies, strict=True) if reply != _LOST]
        if len(settled) < len(replies):
            self._members.is_spent = True
        return [orphan for orphan in taken if orphan is not None], settled

    async def _take(self, epoch: int, own: int, stream_id: str) -> Any:  # Any: the script's reply
        """Raises: StorageError."""
        keys = self._keys.of_opening(stream_id, own)
        position = next(self._members.positions)
        return await self._connection.run(TAKE, keys, epoch, own, stream_id, position)

    async def take_again(self, stream_id: str) -> bool:
        """Take a stream that this server writes from the server that had it before, or list the server that has it.
        Return whether this one has it. Raises: StorageError."""
        owned = self._streams.owned(stream_id)
        epoch = owned.former_epoch if owned is not None else None
        if epoch is not None and await self._take(epoch, self._members.epoch, stream_id):
            return True
        writer = await self._connection.ask(self._connection.client.hget(self._keys.stream(stream_id), "epoch"))
        if writer is not None:
            await self._members.list_writer(int(writer))
        return False

    def _read(
        self, own: int, former: int, stream_id: str, record_row: bytes, rows: Sequence[bytes], takes: int, stop: bytes
    ) -> Orphan | None:
        """Decode a stream that was taken; None if it cannot even be ended."""
        try:
            record = self._rows.read_record(stream_id, record_row)
        except JournalDamaged:
            logger.error("stream %s cannot be read and is lost", stream_id)
            return None
        events: list[Event] = []
        try:
            for row in rows:
                events += self._rows.read_events(stream_id, row)
        except JournalDamaged:
            logger.error("stream %s was damaged and ends before the damage", stream_id)
            return Orphan(own, former, record, events, ("error", _DAMAGED))
        if stop == b"1" and takes:
            return Orphan(own, former, record, events, ("cancelled", _STOPPED))
        if takes > MAX_RECOVERIES:
            return Orphan(own, former, record, events, ("interrupted", TOO_MANY_RECOVERIES))
        return Orphan(own, former, record, events)


def _is_ours(model: bytes | None, models: Container[str]) -> bool:
    """Return whether a stream is of one of these models. One that is missing is taken, so that its id goes."""
    return model is None or model.decode() in models
