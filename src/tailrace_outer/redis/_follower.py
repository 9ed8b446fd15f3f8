"""Follows keys of one shard: messages to this server, and events of streams that other servers write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from tailrace.errors import StorageError
from tailrace_outer.redis._connection import Connection
from tailrace_outer.redis._patience import BLOCK_S, LATE_S, RETRY_S

__all__ = ["Followers", "KeyFollower"]

_PAUSE_S = 5e-6  # after each read, for each key: a read names them all, so its cost grows with them
_ENTRIES = 256  # of each key in one reply

Entries = list[tuple[bytes, Mapping[bytes, bytes]]]


class KeyFollower:
    """One blocking read of Redis at a time, over all followed keys. `on_failure` is called after each read that fails.

    `follow` returns at once: an entry in the inbox ends the read in progress, and the next one has the new key.
    """

    def __init__(self, connection: Connection, inbox: str, on_failure: Callable[[], None]) -> None:
        self._connection = connection
        self._inbox = inbox
        self._on_failure = on_failure
        self._last_ids: dict[str, str] = {}
        self._takers: dict[str, Callable[[Entries], None]] = {}
        self._is_reading = False

    def follow(self, key: str, after: str, take: Callable[[Entries], None]) -> None:
        """Call `take` with the entries of a key whose ids are larger than `after`, as they come."""
        self._last_ids[key] = after
        self._takers[key] = take

    def unfollow(self, key: str) -> None:
        self._last_ids.pop(key, None)
        self._takers.pop(key, None)

    async def wake(self) -> None:
        """Make a read in progress return, so that it takes new keys into account. Raises: StorageError."""
        if self._is_reading:
            await self._connection.ask(self._connection.client.xadd(self._inbox, {"kind": "wake"}, maxlen=10_000))

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            asked = dict(self._last_ids)
            self._is_reading = True
            try:
                reply = await self._connection.ask(
                    self._connection.client.xread(asked, count=_ENTRIES, block=round(1000 * BLOCK_S)),
                    within_s=BLOCK_S + LATE_S,
                )
            except StorageError:
                self._on_failure()
                await asyncio.sleep(RETRY_S)
                continue
            finally:
                self._is_reading = False
            for name, entries in reply or ():
                key = name.decode()
                if self._last_ids.get(key) != asked[key]:
                    continue  # it was followed anew from another position meanwhile
                self._last_ids[key] = entries[-1][0].decode()
                self._takers[key](entries)
            await asyncio.sleep(_PAUSE_S * len(asked))  # what comes meanwhile is read together


class Followers:
    """A follower for each shard. `begin` first."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._of_shard: list[KeyFollower] = []
        self._are_new = asyncio.Event()

    def begin(self, epoch: int, take_messages: Callable[[Entries], None], on_failure: Callable[[], None]) -> None:
        """Follow the inboxes of this server under an epoch, and nothing else."""
        keys = self._connection.keys
        inboxes = [keys.inbox(shard, epoch) for shard in range(keys.num_shards)]
        self._of_shard = [KeyFollower(self._connection, inbox, on_failure) for inbox in inboxes]
        for follower, inbox in zip(self._of_shard, inboxes, strict=True):
            follower.follow(inbox, "0-0", take_messages)
        self._are_new.set()

    def of_shard(self, shard: int) -> KeyFollower:
        return self._of_shard[shard]

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            self._are_new.clear()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(follower.run()) for follower in self._of_shard]
                await self._are_new.wait()
                for task in tasks:
                    task.cancel()
