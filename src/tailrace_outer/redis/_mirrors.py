"""The streams of other servers that have readers on this one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from tailrace.errors import JournalDamaged, StorageError
from tailrace.streams.log import StreamLog
from tailrace.streams.rows import Rows
from tailrace_outer.redis._connection import Connection
from tailrace_outer.redis._follower import Entries, Followers, KeyFollower
from tailrace_outer.redis._members import Members
from tailrace_outer.redis._mirror import Mirror
from tailrace_outer.redis._server_messages import Messages
from tailrace_outer.redis._stored import Stored, load
from tailrace_outer.redis.stream_states import StreamStates

__all__ = ["Mirrors"]

logger = logging.getLogger("tailrace.journal")

_UNREAD_S = 30.0  # how long a stream of another server is followed without readers
_AT_ONCE = 32  # streams that are looked after at the same time
_MISSING = 4  # how often Redis must not have a stream until it is given up


class Mirrors:
    """Follows streams. `on_end` is called with the log of one that has ended."""

    def __init__(
        self,
        connection: Connection,
        followers: Followers,
        members: Members,
        rows: Rows,
        messages: Messages,
        streams: StreamStates,
        *,
        on_end: Callable[[StreamLog], None],
    ) -> None:
        self._connection = connection
        self._followers = followers
        self._keys = connection.keys
        self._members = members
        self._rows = rows
        self._messages = messages
        self._streams = streams
        self._on_end = on_end

    async def find(self, stream_id: str) -> Mirror | None:
        """Return the mirror of a stream. If another server has deleted the stream, the mirror is given up.

        Raises: StorageError.
        """
        mirror = self._streams.mirror(stream_id)
        if mirror is None:
            return None
        is_deleted = await self._is_deleted(stream_id)
        if self._streams.mirror(stream_id) is not mirror:  # it was given up, or replaced, meanwhile
            return None
        if is_deleted:
            self._give_up(mirror, StorageError("This stream is no longer kept."))
            return None
        return mirror

    async def _is_deleted(self, stream_id: str) -> bool:
        """Raises: StorageError."""
        ask, client = self._connection.ask, self._connection.client
        if await ask(client.exists(self._keys.stream(stream_id))):
            return False
        return bool(await ask(client.exists(self._keys.gone(stream_id))))

    async def follow(self, log: StreamLog, epoch: int) -> None:
        """Follow a stream that the server of this epoch writes. Raises: StorageError."""
        mirror = Mirror(log, epoch, self._rows, ask=self._messages.ask, on_end=self._ended)
        self._streams.follow(mirror)
        follower = self._follower(log.stream_id)
        follower.follow(self._keys.events(log.stream_id), f"{log.last_seq}-0", partial(self._take, mirror))
        await follower.wake()

    def _take(self, mirror: Mirror, entries: Entries) -> None:
        try:
            mirror.take(entries)
        except JournalDamaged as error:
            self._give_up(mirror, error)

    def _ended(self, mirror: Mirror) -> None:
        self._unfollow(mirror)
        mirror.log.record = mirror.log.record.finished()
        self._on_end(mirror.log)

    def _give_up(self, mirror: Mirror, reason: StorageError) -> None:
        """Stop following a stream that has not ended, and send its readers away."""
        if isinstance(reason, JournalDamaged):
            logger.error("a stream of another server cannot be read")
        self._unfollow(mirror)
        self._streams.unfollow(mirror)
        mirror.log.release(reason)

    def give_up_all(self) -> None:
        """This server begins again under another epoch."""
        for mirror in self._streams.mirrors:
            self._give_up(mirror, StorageError("This server was cut off from the log store. The stream goes on."))

    def join_again(self) -> None:
        """Tell the writers of all followed streams of the readers here: they may have seen that this server is gone."""
        for mirror in self._streams.mirrors:
            if mirror.log.num_readers:
                self._messages.ask(mirror, "join")

    def _unfollow(self, mirror: Mirror) -> None:
        stream_id = mirror.log.stream_id
        self._follower(stream_id).unfollow(self._keys.events(stream_id))
        mirror.log.producer = None

    def replace(self, log: StreamLog) -> StreamLog:
        """This server writes the stream from now on. Return its log: that of the mirror, if there is one, whose readers
        stay."""
        mirror = self._streams.mirror(log.stream_id)
        if mirror is None:
            return log
        mirror.extend(1, log.events)
        self._unfollow(mirror)
        return mirror.log

    def _follower(self, stream_id: str) -> KeyFollower:
        return self._followers.of_shard(self._keys.shard_of(stream_id))

    async def check(self) -> None:
        """Look after each followed stream. Raises: StorageError."""
        mirrors = self._streams.mirrors
        for start in range(0, len(mirrors), _AT_ONCE):
            await asyncio.gather(*map(self._check, mirrors[start : start + _AT_ONCE]))

    async def catch_up(self, log: StreamLog) -> None:
        """Add the events that Redis has, if this is the log of a followed stream. Raises: StorageError."""
        mirror = self._streams.mirror(log.stream_id)
        if mirror is None or mirror.log is not log:
            return
        stored = await load(self._connection, log.stream_id)
        if isinstance(stored, Stored) and log.producer is mirror:
            mirror.extend(1, stored.events(self._rows, log.stream_id))

    async def _check(self, mirror: Mirror) -> None:
        """See whether a followed stream has another writer now, or events that were compacted before they were read.
        Raises: StorageError."""
        log = mirror.log
        if not log.num_readers and time.monotonic() - mirror.unread_since_s > _UNREAD_S:
            self._give_up(mirror, StorageError("This server follows the stream no longer: it had no reader here."))
            return
        names = "epoch", "last", "ended"
        asked = self._connection.client.hmget(self._keys.stream(log.stream_id), *names)
        epoch, last, ended = await self._connection.ask(asked)
        if self._streams.mirror(log.stream_id) is not mirror:
            return
        if epoch is None:
            mirror.num_missing += 1  # its server may store it again, if Redis has lost it
            if mirror.num_missing == _MISSING:
                self._give_up(mirror, StorageError("The log store does not have this stream at the moment."))
            return
        mirror.num_missing = 0
        await self._members.list_writer(int(epoch))
        if int(last) > log.last_seq:
            try:
                await self.catch_up(log)
            except JournalDamaged as error:  # of this stream alone
                self._give_up(mirror, error)
                return
        elif (
            ended is not None and log.end is None
        ):  # Redis had lost the last events, and the stream has ended without them
            self._give_up(mirror, StorageError("The log store has lost the last events of this stream."))
            return
        if int(epoch) != mirror.epoch:
            mirror.epoch = int(epoch)
            if log.num_readers:
                self._messages.ask(mirror, "join")
