"""Durable streams over a Redis: appends a second and round trips for each, from one server and from two at once.

    python bench/durable_streams.py [--redis redis://127.0.0.1:6379/9] [--seconds 3]

Each writer appends 100 bytes, waits for the confirmation, and appends again. All write to one stream. With two servers,
some round trips find that the other one was first.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import redis

from tailrace.streams.notes import AppendResult, Entry, EntryId
from tailrace_outer.redis.redis_store import open_redis
from tailrace_plugins.durable_streams.durable_opening import open_durable
from tailrace_plugins.durable_streams.durable_streams import DurableStreams
from tailrace_plugins.durable_streams.operations import Creation, ProducerBatch
from tailrace_plugins.durable_streams.shared_durable_streams import SharedDurableStreams

Send = Callable[..., Awaitable[AppendResult]]
BATCH = ProducerBatch(bytes(100), "text/plain")
BUDGET_BYTES = 2**30


async def write(streams: DurableStreams, until_s: float) -> int:
    count = 0
    while time.perf_counter() < until_s:
        await streams.perform(lambda store: store.append(b"a", BATCH))
        count += 1
    return count


async def measure(url: str, num_servers: int, num_writers: int, seconds: float) -> str:
    num_calls = 0
    async with AsyncExitStack() as stack:
        shared = []
        for _ in range(num_servers):
            store = await stack.enter_async_context(open_redis(url))
            notes = await store.notes_of("durable")
            shared.append(await stack.enter_async_context(open_durable(notes, BUDGET_BYTES)))

        def count(send: Send) -> Send:
            async def counted(after: EntryId, entry: Entry, *, asks_for_turn: bool) -> AppendResult:
                nonlocal num_calls
                num_calls += 1
                return await send(after, entry, asks_for_turn=asks_for_turn)

            return counted

        await shared[0].perform(lambda store: store.create(b"a", Creation("text/plain"), b"")[1])
        for streams in shared:
            assert isinstance(streams, SharedDurableStreams)
            setattr(streams.log, "append", count(streams.log.append))  # noqa: B010  # mypy refuses the plain form
        begun_s = time.perf_counter()
        writers = [write(shared[n % num_servers], begun_s + seconds) for n in range(num_servers * num_writers)]
        num_appends = sum(await asyncio.gather(*writers))
        took_s = time.perf_counter() - begun_s
    return f"{num_appends / took_s:9,.0f} {num_calls / num_appends:21.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", default="redis://127.0.0.1:6379/9")
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    print("servers  writers each  appends/s  round trips / append")
    for num_servers in (1, 2):
        for num_writers in (1, 16, 64):
            prefix = f"bench-{secrets.token_hex(4)}"
            url = f"{options.redis}?prefix={prefix}"
            found = asyncio.run(measure(url, num_servers, num_writers, options.seconds))
            print(f"{num_servers:7} {num_writers:13} {found}")
            with redis.Redis.from_url(options.redis) as client:
                for key in client.scan_iter(match=f"{prefix}:*", count=1_000):
                    client.delete(key)


if __name__ == "__main__":
    main()
