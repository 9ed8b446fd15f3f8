"""The log stores beside each other: events a second, time to open a stream, delay of a reader on another server.

    python bench/log_stores.py [--redis redis://127.0.0.1:6379/9] [--turns 5] [--output JSON]

Each turn writes 200 steps to 1, 16 and 64 streams in each store, one token a stream and step, and waits until all can
be read. The next step begins when the last one can be read, as with an engine that is faster than the store. Then a
reader on a second server follows one stream. Numbers are medians over the turns, and the least processor times of this
process and of Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import redis

from tailrace.streams import Lease, LogStore, Reader, StreamLog, open_sqlite
from tailrace.types import ANONYMOUS, End, Record, Sampling, TextDelta, Usage, new_stream_id
from tailrace_outer.measure.bench.load import percentile
from tailrace_outer.redis.redis_store import open_redis

STEPS = 200
LOADS = (1, 16, 64)
PREFIX = "bench-log-stores"
SUMMARIES: dict[str, Callable[[Iterable[float]], float]] = {
    "events_per_s": statistics.median, "open_ms": statistics.median, "server_us": min, "redis_us": min
}  # fmt: skip


async def wait_for(logs: Sequence[StreamLog], count: int) -> None:
    for log in logs:
        while log.last_seq < count:
            await Reader(log, log.last_seq).wait()


async def open_streams(store: LogStore, count: int) -> list[Lease]:
    return [await store.open(Record(new_stream_id(), time.time(), sampling=Sampling(seed=1))) for _ in range(count)]


def redis_s(client: redis.Redis) -> float:
    """Return the processor time that Redis has used."""
    return sum(float(value) for name, value in client.info("cpu").items() if name in ("used_cpu_sys", "used_cpu_user"))


async def write(store: LogStore, num_streams: int, client: redis.Redis) -> dict[str, float]:
    begun_s = time.perf_counter()
    leases = await open_streams(store, num_streams)
    open_s = (time.perf_counter() - begun_s) / num_streams
    begun_s, used_s, redis_used_s = time.perf_counter(), time.process_time(), redis_s(client)
    for step in range(1, STEPS + 1):
        for lease in leases:
            store.append(lease, (TextDelta(" word", (step,)),))
        await wait_for([lease.log for lease in leases], step)
    seconds = time.perf_counter() - begun_s
    used_s, redis_used_s = time.process_time() - used_s, redis_s(client) - redis_used_s
    for lease in leases:
        store.append(lease, (End("done", Usage(1, STEPS)),))
    await wait_for([lease.log for lease in leases], STEPS + 1)
    events = num_streams * STEPS
    return {
        "events_per_s": events / seconds,
        "open_ms": 1000 * open_s,
        "server_us": 1e6 * used_s / events,
        "redis_us": 1e6 * redis_used_s / events,
    }


async def delays(store: LogStore, other: LogStore, num_streams: int) -> list[float]:
    """Return by how many ms a reader on another server is later than one on this server."""
    leases = await open_streams(store, num_streams)
    log = await other.read(ANONYMOUS, leases[0].stream_id)
    found = []
    with Reader(log):
        for step in range(1, STEPS + 1):
            for lease in leases:
                store.append(lease, (TextDelta(" word", (step,)),))

            async def seen(log: StreamLog, step: int = step) -> float:
                await wait_for([log], step)
                return time.perf_counter()

            here_s, there_s = await asyncio.gather(seen(leases[0].log), seen(log))
            found.append(1000 * (there_s - here_s))
            await asyncio.sleep(0.005)
    return found


def memory(url: str) -> tuple[int, int]:
    """Return how many bytes the keys of this program take, those of running and those of finished streams."""
    running = finished = 0
    with redis.Redis.from_url(url) as client:
        for key in client.scan_iter(match=f"{PREFIX}:*", count=1_000):
            num_bytes = client.memory_usage(key, samples=0) or 0
            if b":events:" in key:
                running += num_bytes
            elif b":stream:" in key:
                finished += num_bytes
    return running, finished


async def bytes_a_token(url: str) -> dict[str, float]:
    async with open_redis(f"{url}?prefix={PREFIX}") as store:
        before = memory(url)
        leases = await open_streams(store, 16)
        for step in range(1, STEPS + 1):
            for lease in leases:
                store.append(lease, (TextDelta(" word", (step,)),))
            await wait_for([lease.log for lease in leases], step)
        running = memory(url)
        for lease in leases:
            store.append(lease, (End("done", Usage(1, STEPS)),))
        await wait_for([lease.log for lease in leases], STEPS + 1)
        await asyncio.sleep(4)  # until they are compacted
        finished = memory(url)
    tokens = 16 * STEPS
    return {
        "running_bytes_per_token": (running[0] - before[0]) / tokens,
        "finished_bytes_per_token": (finished[1] - before[1]) / tokens,
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description="The log stores beside each other.")
    parser.add_argument("--redis", default="redis://127.0.0.1:6379/9")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: dict[tuple[str, int], list[dict[str, float]]] = {}
    late: dict[int, list[float]] = {1: [], 16: []}
    try:
        for _ in range(options.turns):
            with tempfile.TemporaryDirectory() as directory, redis.Redis.from_url(options.redis) as client:
                stores: dict[str, AbstractAsyncContextManager[LogStore]] = {
                    "sqlite": open_sqlite(Path(directory)),
                    "redis": open_redis(f"{options.redis}?prefix={PREFIX}"),
                }
                for name, opened in stores.items():
                    async with opened as store:
                        for load in LOADS:
                            rows.setdefault((name, load), []).append(await write(store, load, client))
            url = f"{options.redis}?prefix={PREFIX}"
            async with open_redis(url) as one, open_redis(url) as other:
                for load, found in late.items():
                    found += await delays(one, other, load)
        sizes = await bytes_a_token(options.redis)
    finally:
        with redis.Redis.from_url(options.redis) as client:
            for key in client.scan_iter(match=f"{PREFIX}:*", count=1_000):
                client.delete(key)
    table = [
        {"store": name, "streams": load}
        | {key: round(summary(row[key] for row in found), 2) for key, summary in SUMMARIES.items()}
        for (name, load), found in rows.items()
    ]
    for load in LOADS:
        ratio = statistics.median(
            fast["events_per_s"] / slow["events_per_s"]
            for fast, slow in zip(rows["redis", load], rows["sqlite", load], strict=True)
        )
        table.append({"redis / sqlite, events_per_s": round(ratio, 2), "streams": load})
    for load, found in late.items():
        p50, p99 = statistics.median(found), percentile(found, 0.99)
        table.append({"delay elsewhere, ms": {"p50": round(p50, 2), "p99": round(p99, 2)}, "streams": load})
    table.append({key: round(value, 1) for key, value in sizes.items()})
    for line in table:
        print(json.dumps(line))
    if options.output:
        options.output.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
