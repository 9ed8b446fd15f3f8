"""Durable streams of one server, and of several servers over one Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from tailrace_outer.redis.redis_store import open_redis
from tailrace_plugins.durable_streams.durable_changes import Stamp
from tailrace_plugins.durable_streams.durable_opening import open_durable
from tailrace_plugins.durable_streams.durable_streams import DurableStreams
from tailrace_plugins.durable_streams.operations import Creation, ProducerBatch, Receipt

__all__ = ["BUDGET_BYTES", "LEASE_S", "append", "content", "create", "servers"]

BUDGET_BYTES = 10**6
LEASE_S = 1.0


@asynccontextmanager
async def servers(
    url: str,
    count: int = 2,
    *,
    budget_bytes: int = BUDGET_BYTES,
    give_up_after_s: float = 60.0,
    key: bytes | None = None,
) -> AsyncIterator[list[DurableStreams]]:
    async with AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(
                open_redis(url, lease_s=LEASE_S, give_up_after_s=give_up_after_s, journal_key=key)
            )
            for _ in range(count)
        ]
        yield [
            await stack.enter_async_context(open_durable(await store.notes_of("durable"), budget_bytes))
            for store in stores
        ]


async def create(streams: DurableStreams, key: bytes, creation: Creation | None = None, body: bytes = b"") -> bool:
    """Return whether the stream is new."""
    wanted = creation if creation is not None else Creation("text/plain")
    return await streams.perform(lambda store: store.create(key, wanted, body)[1])


async def append(
    streams: DurableStreams,
    key: bytes,
    body: bytes,
    *,
    stamp: Stamp | None = None,
    seq: str | None = None,
    closes: bool = False,
) -> Receipt:
    batch = ProducerBatch(body, "text/plain", closes, stamp, seq)
    return await streams.perform(lambda store: store.append(key, batch))


async def content(streams: DurableStreams, key: bytes) -> list[bytes]:
    """Return what each append has written. Raises: as `DurableStreams.use`."""
    return [b"".join(chunk.pieces) for chunk in (await streams.use(key)).chunks]
