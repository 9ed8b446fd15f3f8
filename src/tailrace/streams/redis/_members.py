"""Which servers live. Each renews a lease; one whose lease has run out is declared dead, and others take its streams.

A lease lasts half of `lease_s`. Others declare a server dead when they have seen its lease missing for a quarter of
`lease_s`, during which Redis answered them. So after a restart of Redis, in which all leases ran out, every server can
renew its own first. No server compares its clock with that of another.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from tailrace.errors import StorageError
from tailrace.streams.redis._connection import Connection
from tailrace.streams.redis._scripts import BURY, NEW_EPOCH, RENEW

__all__ = ["Members"]

logger = logging.getLogger("tailrace.journal")

_DEAD_MS = 24 * 3600 * 1000  # how long a lease says "dead" when nothing of that server is left


class Members:
    """The lease of this server, and the leases of the others. `join` first."""

    def __init__(self, connection: Connection, *, lease_s: float) -> None:
        self._connection = connection
        self._lease_ms = int(500 * lease_s)
        self._tick_s = lease_s / 8
        self._confirm_s = lease_s / 4
        self.epoch = 0
        self.positions = itertools.count(1)  # of the streams of this server, in the order in which it got them
        self.alive: frozenset[int] = frozenset()  # epochs of the other servers, when they were last looked at
        self.dead: frozenset[int] = frozenset()  # epochs of dead servers of which something may be left
        self._missing_since_s: dict[int, float] = {}  # by epoch; loop time
        self._dead_since_s: dict[int, float] = {}  # by epoch; loop time
        self._former: set[int] = set()  # epochs of this server that are to be listed as dead again

    async def join(self) -> None:
        """Get an epoch, and tell the other servers. Raises: StorageError."""
        keys = self._connection.keys
        epoch = int(await self._connection.run(NEW_EPOCH, [keys.epoch]))
        await self._connection.run(RENEW, [keys.lease(epoch)], self._lease_ms)  # before it is listed
        await self._command("sadd", keys.servers, str(epoch))
        self.epoch = epoch

    async def rejoin(self) -> None:
        """Get a new epoch after other servers have declared this one dead. Raises: StorageError."""
        former = self.epoch
        await self.join()
        self.list_again(former)

    def list_again(self, former: int) -> None:
        """Show the others soon that this former epoch of this server may have left streams."""
        self._former.add(former)

    async def leave(self) -> None:
        """Give the lease back: other servers take over at once what is left. Raises: StorageError."""
        if await self.has_streams(self.epoch):
            await self._command("set", self._connection.keys.lease(self.epoch), "dead")
        else:
            await self.forget(self.epoch)

    async def run(self, on_tick: Callable[[], Awaitable[None]], on_dead: Callable[[], Awaitable[None]]) -> None:
        """Renew the lease until cancelled. `on_tick` is called after each renewal; `on_dead` if other servers have
        declared this one dead."""
        while True:
            await asyncio.sleep(self._tick_s)
            try:
                if not await self._connection.run(RENEW, [self._connection.keys.lease(self.epoch)], self._lease_ms):
                    logger.error("Other servers took the streams of this server over: it did not answer for too long.")
                    await on_dead()
                await self._list()
                await self.find_dead()
                await on_tick()
            except StorageError:
                self._missing_since_s.clear()

    async def _list(self) -> None:
        """List this server, which Redis may have forgotten, and its former epochs. Raises: StorageError.

        A server may have begun streams before it learned that it was declared dead, and the others may have looked
        before that.
        """
        keys = self._connection.keys
        await self._command("sadd", keys.servers, str(self.epoch))
        for epoch in tuple(self._former):
            await self._command("set", keys.lease(epoch), "dead")
            await self._command("sadd", keys.servers, str(epoch))
            self._former.discard(epoch)

    def is_long_dead(self, epoch: int, duration_s: float) -> bool:
        """Return whether this server has known for so long that another one is dead."""
        now_s = asyncio.get_running_loop().time()
        return now_s - self._dead_since_s.get(epoch, now_s) > duration_s

    async def has_streams(self, epoch: int) -> bool:
        """Return whether a server owns streams. Raises: StorageError."""
        keys = self._connection.keys
        counts = [self._command("zcard", keys.owned(shard, epoch)) for shard in range(keys.num_shards)]
        return any(await asyncio.gather(*counts))

    async def forget(self, epoch: int) -> None:
        """Nothing of a server is left. Raises: StorageError."""
        keys = self._connection.keys
        await self._command("srem", keys.servers, str(epoch))
        for shard in range(keys.num_shards):
            await self._command("delete", keys.inbox(shard, epoch))
        await self._command("set", keys.lease(epoch), "dead", px=_DEAD_MS)
        self.dead -= {epoch}

    async def find_dead(self) -> None:
        """Look which servers live, and declare those dead whose leases are missing for too long. Raises:
        StorageError."""
        keys = self._connection.keys
        others = [int(epoch) for epoch in await self._command("smembers", keys.servers) if int(epoch) != self.epoch]
        found = await asyncio.gather(*(self._command("get", keys.lease(epoch)) for epoch in others))
        now_s = asyncio.get_running_loop().time()
        dead, missing = set(), {}
        for epoch, lease in zip(others, found, strict=True):
            if lease == b"dead":
                dead.add(epoch)
            elif lease is None:
                missing[epoch] = self._missing_since_s.get(epoch, now_s)
                if now_s - missing[epoch] >= self._confirm_s and await self._connection.run(BURY, [keys.lease(epoch)]):
                    logger.warning("A server does not answer any more; its streams are taken over.")
                    dead.add(epoch)
        self._missing_since_s = missing
        self._dead_since_s = {epoch: self._dead_since_s.get(epoch, now_s) for epoch in dead}
        self.dead = frozenset(dead)
        self.alive = frozenset(others) - self.dead

    async def _command(self, name: str, *arguments: str, **options: int) -> Any:
        return await self._connection.ask(getattr(self._connection.client, name)(*arguments, **options))
