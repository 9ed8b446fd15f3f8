"""Which servers live. Each renews a lease; one whose lease has run out is declared dead, and others take its streams.

A lease lasts half of `lease_s`. Others declare a server dead when they have seen its lease missing for a quarter of
`lease_s`, during which Redis answered them. So after a restart of Redis, in which all leases ran out, every server can
renew its own first. Leases last as Redis's clock says. The clocks of the servers do not matter; each is compared with
Redis's, so that a wrong one is seen.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from tailrace.errors import StorageError
from tailrace_outer.redis._connection import Connection
from tailrace_outer.redis._redis_keys import DAY_MS
from tailrace_outer.redis._scripts import DECLARE_DEAD, NEW_EPOCH, READ_LEASES, RENEW, UNLIST

__all__ = ["Members"]

logger = logging.getLogger("tailrace.journal")

_CLOCK_TOLERANCE_S = 30.0


class Members:
    """The lease of this server, and the leases of the others. `join` first."""

    def __init__(self, connection: Connection, *, lease_s: float) -> None:
        self._connection = connection
        self._lease_ms = int(500 * lease_s)
        self._tick_s = lease_s / 8
        self._confirm_s = lease_s / 4
        self.epoch = 0
        self._certain_until_s = 0.0  # loop time
        self.positions = itertools.count(1)  # of the streams of this server, in the order in which it got them
        self.alive: frozenset[int] = frozenset()  # epochs of the other servers, when they were last looked at
        self.dead: frozenset[int] = frozenset()  # epochs of dead servers of which something may be left
        self._missing_since_s: dict[int, float] = {}  # by epoch; loop time
        self._dead_since_s: dict[int, float] = {}  # by epoch; loop time
        self.was_missing = False  # Redis had lost this server from its list at the last check
        self.is_spent = False  # this epoch has lost a stream that this server may take again: it needs another one
        self.clock_offset_s = 0.0  # by how much the clock of this server is ahead of Redis's
        self.models: Collection[str] = ()  # of this server, as they are now; empty until they are known
        self.with_other_models: frozenset[int] = frozenset()  # epochs of the living servers that have other models

    async def join(self) -> None:
        """Get an epoch, and tell the other servers. Raises: StorageError."""
        keys = self._connection.keys
        epoch = int(await self._connection.run(NEW_EPOCH, [keys.epoch]))
        await self._renew(epoch)  # before it is listed
        certain_until_s, self._certain_until_s = self._certain_until_s, 0.0  # not for the epoch before
        await self._command("sadd", keys.servers, str(epoch))
        self.epoch, self.is_spent, self._certain_until_s = epoch, False, certain_until_s

    async def _renew(self, epoch: int) -> bool:
        """Return whether this server still has its lease. Raises: StorageError."""
        sent_s, until_s = time.time(), asyncio.get_running_loop().time() + self._confirm_s
        now: Sequence[bytes] | None = await self._connection.run(
            RENEW, [self._connection.keys.lease(epoch)], self._lease_ms
        )
        if now is None:
            return False
        self._certain_until_s = until_s
        was_off, redis_s = abs(self.clock_offset_s) > _CLOCK_TOLERANCE_S, int(now[0]) + int(now[1]) / 1e6
        self.clock_offset_s = (sent_s + time.time()) / 2 - redis_s
        if abs(self.clock_offset_s) > _CLOCK_TOLERANCE_S and not was_off:
            logger.warning(
                "The clock of this server differs from that of Redis by %.0f s. Streams do not depend on it, but times "
                "in answers, the expiry of keys and monthly quotas do.",
                self.clock_offset_s,
            )
        return True

    @property
    def is_certain(self) -> bool:
        """Whether no other server can have declared this one dead since it renewed its lease. They wait so long, even
        if Redis has lost all leases."""
        return asyncio.get_running_loop().time() < self._certain_until_s

    async def list_writer(self, epoch: int) -> None:
        """Add the writer of a stream to the list of servers, if this server does not know it. The next check then finds
        it alive or dead. This is needed after a failover of a cluster node, which may have lost the take-over of the
        stream. Raises: StorageError."""
        if epoch != self.epoch and epoch not in self.alive and epoch not in self.dead:
            await self._command("sadd", self._connection.keys.servers, str(epoch))

    async def leave(self) -> None:
        """Give the lease back: other servers take over at once what is left. Raises: StorageError."""
        if await self.num_streams(self.epoch):
            await self._command("set", self._connection.keys.lease(self.epoch), "dead")
        else:
            await self.forget(self.epoch)

    async def run(self, on_tick: Callable[[], None], on_dead: Callable[[], Awaitable[None]]) -> None:
        """Renew the lease until cancelled. `on_tick` is called after each renewal; `on_dead` if other servers have
        declared this one dead, also if a failover has lost that."""
        while True:
            await asyncio.sleep(self._tick_s)
            try:
                if self.is_spent or not await self._renew(self.epoch):
                    logger.error("Other servers took the streams of this server over: it did not answer for too long.")
                    await on_dead()
                await self._list()
                await self.find_dead()
                await self._compare_models()
                on_tick()
            except StorageError:
                self._missing_since_s.clear()

    async def _list(self) -> None:
        """List this server, which Redis may have forgotten. Raises: StorageError."""
        keys = self._connection.keys
        self.was_missing = bool(await self._command("sadd", keys.servers, str(self.epoch)))
        if self.models:
            await self._command("hset", keys.models, str(self.epoch), self._shown_models)

    def is_long_dead(self, epoch: int, duration_s: float) -> bool:
        """Return whether this server has known for so long that another one is dead."""
        now_s = asyncio.get_running_loop().time()
        return now_s - self._dead_since_s.get(epoch, now_s) > duration_s

    async def num_streams(self, epoch: int) -> int:
        """Return how many streams a server owns. Raises: StorageError."""
        keys = self._connection.keys
        counts = [self._command("zcard", keys.owned(shard, epoch)) for shard in range(keys.num_shards)]
        return sum(await asyncio.gather(*counts))

    async def streams(self, epoch: int) -> list[str]:
        """Return the ids of the streams that a server owns, in the order in which it got them. Raises: StorageError."""
        keys = self._connection.keys
        shards = [keys.owned(shard, epoch) for shard in range(keys.num_shards)]
        owned = await asyncio.gather(*(self._command("zrange", shard, 0, -1, withscores=True) for shard in shards))
        return [stream_id.decode() for _, stream_id in sorted((at, one) for some in owned for one, at in some)]

    async def forget(self, epoch: int) -> None:
        """Nothing of a server is left. Raises: StorageError."""
        keys = self._connection.keys
        # First: nobody looks at the lease of an unlisted server, and if Redis's clock was set, it may last for long.
        await self._command("set", keys.lease(epoch), "dead", px=DAY_MS)
        await self._command("srem", keys.servers, str(epoch))
        await self._command("hdel", keys.models, str(epoch))
        for shard in range(keys.num_shards):
            await self._connection.run(UNLIST, [keys.owned(shard, epoch), keys.writers(shard)], epoch)
            await self._command("delete", keys.inbox(shard, epoch))
        self.dead -= {epoch}

    async def find_dead(self) -> None:
        """Look which servers live, and declare those dead whose leases are missing for too long. Raises:
        StorageError."""
        keys = self._connection.keys
        listed: set[bytes] = set()
        for shard in range(keys.num_shards):
            lists = [keys.servers, keys.writers(0)] if shard == 0 else [keys.writers(shard)]
            listed |= set(await self._command("sunion", lists))
        others = sorted(epoch for epoch in map(int, listed) if epoch != self.epoch)
        found = await self._connection.run(READ_LEASES, [keys.lease(epoch) for epoch in others]) if others else ()
        now_s = asyncio.get_running_loop().time()
        dead, missing = set(), {}
        for epoch, lease in zip(others, found, strict=True):
            if lease == b"dead":
                dead.add(epoch)
            elif lease is None:
                missing[epoch] = self._missing_since_s.get(epoch, now_s)
                if now_s - missing[epoch] >= self._confirm_s and await self._connection.run(
                    DECLARE_DEAD, [keys.lease(epoch)]
                ):
                    logger.warning("A server does not answer any more; its streams are taken over.")
                    dead.add(epoch)
        self._missing_since_s = missing
        self._dead_since_s = {epoch: self._dead_since_s.get(epoch, now_s) for epoch in dead}
        self.dead = frozenset(dead)
        self.alive = frozenset(others) - self.dead

    async def _compare_models(self) -> None:
        """Look which servers have other models: they may belong to another group. Raises: StorageError."""
        found: dict[int, str] = {}
        if self.models and self.alive:
            epochs = sorted(self.alive)
            rows = await self._command("hmget", self._connection.keys.models, epochs)
            shown = {epoch: row.decode() for epoch, row in zip(epochs, rows, strict=True) if row is not None}
            found = {epoch: names for epoch, names in shown.items() if names != self._shown_models}
        for epoch in found.keys() - self.with_other_models:
            logger.warning(
                "A server with other models (%s) shares this log store. A server continues only streams of its own "
                "models. If this is another group of servers, give it its own ?prefix= in --journal.",
                found[epoch].replace("\n", ", "),
            )
        self.with_other_models = frozenset(found)

    @property
    def _shown_models(self) -> str:
        return "\n".join(sorted(self.models))

    async def _command(self, name: str, *arguments: str | int | Sequence[int] | Sequence[str], **options: int) -> Any:
        return await self._connection.ask(getattr(self._connection.client, name)(*arguments, **options))
