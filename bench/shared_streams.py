"""Whole servers with streams in Redis beside one with streams on disk, and what a second server sees.

    python bench/shared_streams.py [--redis redis://127.0.0.1:6379/9] [--turns 5] [--output JSON]

Three servers with the scripted engine at full speed: one with `--journal disk`, two that share a Redis. Each turn
measures in turns on disk and in Redis, at 1, 16 and 64 streams: events a second, microseconds of the server's processor
for each event, and, at 1 stream, the time to the first token. Then, over the two that share a Redis: how much later a
reader on the other server sees a token, and how long a stop and the first event of a stream take there. At last it
follows 1, 50 and 400 streams at once from the other server: how much later a token comes, and what each event costs
Redis: bytes that it receives, and microseconds of its processor. Prints medians, and the least processor time, because
other work on the machine can only add to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import redis

from servers import RunningServer, serving
from tailrace_outer.measure.bench.load import percentile, run_load

LOADS = {1: 4_000, 16: 2_000, 64: 1_000}  # streams, and tokens of each
FOLLOWED = (1, 50, 400)  # streams
PREFIX = "bench-shared-streams"
PACED = {"prompt": "A river.", "max_tokens": 300, "seed": 1}


class Server:
    """A server, and a client of it."""

    def __init__(self, running: RunningServer) -> None:
        self.running = running
        self.port = running.port
        self.http = httpx.Client(base_url=running.url, timeout=60, trust_env=False)

    def create(self) -> str:
        return str(self.http.post("/v1/streams", json=PACED).json()["id"])

    def load(self, num_streams: int, num_tokens: int) -> dict[str, float]:
        body = json.dumps({"prompt": "A river.", "max_tokens": num_tokens}).encode()
        head = (
            f"POST /v1/streams HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        cpu_s = self.running.cpu_s()
        sample = asyncio.run(run_load("127.0.0.1", self.port, [head + body] * num_streams, concurrency=num_streams))
        cpu_s = self.running.cpu_s() - cpu_s
        return {
            "events_per_s": sample.events_per_s,
            "cpu_us_per_event": 1e6 * cpu_s / sample.num_events,
            "ttft_ms": 1000 * statistics.median(sample.ttft_s),
        }

    def first_token_ms(self) -> float:
        """A short request, which nothing else disturbs."""
        return self.load(1, 2)["ttft_ms"]


async def event_times(port: int, stream_id: str) -> list[float]:
    """Return when each event of a stream came, for a reader who is there from its beginning."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write(f"GET /v1/streams/{stream_id}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    times: list[float] = []
    while chunk := await reader.read(2**16):
        times += [time.perf_counter()] * chunk.count(b"\ndata: ")
        if b"\nevent: " in chunk:
            break
    writer.close()
    return times


async def delays_ms(one: Server, other: Server) -> list[float]:
    """Return by how much later the events of a stream come from the other server."""
    stream_id = one.create()
    here, there = await asyncio.gather(event_times(one.port, stream_id), event_times(other.port, stream_id))
    both = min(len(here), len(there))  # the first events may have come before the readers
    return [1000 * (late - early) for early, late in zip(here[-both + 20 :], there[-both + 20 :], strict=True)]


async def followed(one: Server, other: Server, num_streams: int, client: redis.Redis) -> dict[str, float]:
    """Read streams of one server from the other, all at once."""

    def spent() -> tuple[float, int]:
        found = client.info("all")
        return found["used_cpu_sys"] + found["used_cpu_user"], found["total_net_input_bytes"]

    ids = [one.create() for _ in range(num_streams - 1)]
    cpu_s, num_bytes = spent()
    *others, delays = await asyncio.gather(*(event_times(other.port, one_id) for one_id in ids), delays_ms(one, other))
    num_events = sum(map(len, others)) + len(delays)
    now_cpu_s, now_bytes = spent()
    return {
        "p50, ms": percentile(delays, 0.5),
        "p99, ms": percentile(delays, 0.99),
        "redis, bytes_per_event": (now_bytes - num_bytes) / num_events,
        "redis, cpu_us_per_event": 1e6 * (now_cpu_s - cpu_s) / num_events,
    }


def follow_ms(one: Server, other: Server) -> float:
    """Return how long the first event of a running stream takes from another server than its own."""
    stream_id = one.create()
    time.sleep(0.3)
    begun_s = time.perf_counter()
    with other.http.stream("GET", f"/v1/streams/{stream_id}/events") as answer:
        next(answer.iter_raw())
        return 1000 * (time.perf_counter() - begun_s)


def stop_ms(one: Server, other: Server) -> float:
    stream_id = one.create()
    begun_s = time.perf_counter()
    other.http.post(f"/v1/streams/{stream_id}/cancel").raise_for_status()
    return 1000 * (time.perf_counter() - begun_s)


@contextmanager
def servers(url: str) -> Iterator[dict[str, Server]]:
    shared = ("--journal", f"{url}?prefix={PREFIX}")
    starts = {
        "disk": ("scripted",),
        "redis": ("scripted", *shared),
        "paced": ("scripted:tokens_per_s=100", *shared),
        "other": ("scripted:tokens_per_s=100", *shared),
    }
    with ExitStack() as stack:
        many = ("--max-concurrent-requests", "1000")
        yield {name: Server(stack.enter_context(serving(*start, *many))) for name, start in starts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole servers with streams in Redis beside one with streams on disk.")
    parser.add_argument("--redis", default="redis://127.0.0.1:6379/9")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: defaultdict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    apart: defaultdict[str, list[float]] = defaultdict(list)
    at_once: defaultdict[int, list[dict[str, float]]] = defaultdict(list)
    try:
        with servers(options.redis) as found:
            for _ in range(options.turns):
                for num_streams, num_tokens in LOADS.items():
                    for name in ("disk", "redis"):
                        rows[name, num_streams].append(found[name].load(num_streams, num_tokens))
                for _ in range(10):
                    for name in ("disk", "redis"):
                        apart[f"first token, {name}"].append(found[name].first_token_ms())
                paced, other = found["paced"], found["other"]
                apart["token elsewhere"] += asyncio.run(delays_ms(paced, other))
                apart["follow elsewhere"] += [follow_ms(paced, other) for _ in range(5)]
                apart["stop elsewhere"] += [stop_ms(paced, other) for _ in range(5)]
                for num_streams in FOLLOWED:
                    with redis.Redis.from_url(options.redis) as client:
                        at_once[num_streams].append(asyncio.run(followed(paced, other, num_streams, client)))
    finally:
        with redis.Redis.from_url(options.redis) as client:
            for key in client.scan_iter(match=f"{PREFIX}:*", count=1_000):
                client.delete(key)
    lines: list[dict[str, object]] = []
    for num_streams in LOADS:
        disk, shared = rows["disk", num_streams], rows["redis", num_streams]
        ratio = statistics.median(b["events_per_s"] / a["events_per_s"] for a, b in zip(disk, shared, strict=True))
        line: dict[str, object] = {"streams": num_streams, "redis / disk, events_per_s": round(ratio, 2)}
        for name, some in (("disk", disk), ("redis", shared)):
            line[f"{name}, events_per_s"] = round(statistics.median(row["events_per_s"] for row in some))
            line[f"{name}, least cpu_us_per_event"] = round(min(row["cpu_us_per_event"] for row in some), 2)
        lines.append(line)
    for name, times in apart.items():
        ms = {"p50": percentile(times, 0.5), "p90": percentile(times, 0.9), "p99": percentile(times, 0.99)}
        lines.append({f"{name}, ms": {key: round(value, 2) for key, value in ms.items()}})
    for num_streams, some in at_once.items():
        medians = {key: round(statistics.median(one[key] for one in some), 2) for key in some[0]}
        lines.append({"streams followed elsewhere": num_streams, **medians})
    for line in lines:
        print(json.dumps(line))
    if options.output:
        options.output.write_text(json.dumps(lines, indent=2) + "\n")


if __name__ == "__main__":
    main()
