"""Simulates many servers over a Redis Cluster, with measured costs: where the next limit is, and what moves it.

    python bench/scale_sim.py

Each server commits the tokens of its streams with one call of a script for each shard; the next call to a shard begins
when the last one was answered, and takes what has come meanwhile. A node of Redis is a queue that serves one call at a
time. Then a rack is lost: its leases run out, and the other servers take its streams with half of the time of Redis.

The simulation knows processor time and waiting. It knows no network limits, no engines and no pauses of Redis.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import statistics
from dataclasses import dataclass

from tailrace_outer.measure.bench.load import percentile

SHARDS = 16  # of keys in a cluster, as in `tailrace_outer/redis/_keys.py`; a single Redis has one
ROUND_TRIP_S = 0.0005  # of the network
CALL_S = 60e-6  # of Redis, for a commit
EVENT_S = 3.2e-6  # of Redis, for each stream in it
SERVER_EVENT_S = 3.0e-6  # of a server's processor, with one reader each
TAKE_S = 190e-6  # of Redis, for a stream of 100 tokens
TOKENS_PER_S = 20.0  # of each stream
SIMULATED_S = 1.0


@dataclass(frozen=True)
class Site:
    """Servers, streams that run at the same time, and primaries of the cluster."""

    servers: int
    streams: int
    nodes: int
    pause_s: float = 0.0  # the least time between two calls of a server to a shard; tailrace has none
    lease_s: float = 10.0


def simulate(site: Site, *, seed: int = 1) -> dict[str, float]:
    """Return delays of commits, use of the processors, and how long the streams of a lost rack wait."""
    chance = random.Random(seed)
    num_shards = SHARDS if site.nodes > 1 else 1
    per_shard = site.streams / site.servers / num_shards
    free_s = [0.0] * site.nodes  # when each node has served what it got
    busy_s = [0.0] * site.nodes
    delays: list[float] = []
    order = itertools.count()
    calls = [
        (chance.random() / TOKENS_PER_S, next(order), shard, 0.0)
        for _ in range(site.servers)
        for shard in range(num_shards)
    ]
    heapq.heapify(calls)
    while calls and calls[0][0] < SIMULATED_S:
        now_s, _, shard, before_s = heapq.heappop(calls)
        node = shard % site.nodes
        num_events = max(1.0, min(per_shard, per_shard * TOKENS_PER_S * (now_s - before_s)))
        cost_s = CALL_S + EVENT_S * num_events
        free_s[node] = max(free_s[node], now_s + ROUND_TRIP_S / 2) + cost_s
        busy_s[node] += cost_s
        answered_s = free_s[node] + ROUND_TRIP_S / 2
        delays.append(answered_s - now_s)
        # Tokens come all the time: the next call has those that came during this one, and waits for one if none did.
        again_s = max(answered_s, now_s + site.pause_s) + chance.expovariate(per_shard * TOKENS_PER_S)
        heapq.heappush(calls, (again_s, next(order), shard, now_s))
    use = max(busy / max(SIMULATED_S, free) for busy, free in zip(busy_s, free_s, strict=True))
    lost = site.streams / 10  # a rack has a tenth of the servers; taking its streams gets half of the time of Redis
    return {
        "redis_use": round(use, 2),
        "server_use": round(site.streams / site.servers * TOKENS_PER_S * SERVER_EVENT_S, 3),
        "commit_p50_ms": round(1000 * statistics.median(delays), 1),
        "commit_p99_ms": round(1000 * percentile(delays, 0.99), 1),
        "rack_lost_s": round(0.75 * site.lease_s + lost * TAKE_S / site.nodes / 0.5, 1),
    }


SITES = [
    Site(10, 1_000, 1), Site(10, 10_000, 1), Site(100, 10_000, 1), Site(100, 100_000, 3), Site(100, 100_000, 16),
    Site(100, 100_000, 16, pause_s=0.02), Site(1_000, 100_000, 16), Site(1_000, 100_000, 16, pause_s=0.1),
    Site(1_000, 1_000_000, 16), Site(1_000, 1_000_000, 16, pause_s=0.1),
]  # fmt: skip


def main() -> None:
    for site in SITES:
        row = {"servers": site.servers, "streams": site.streams, "nodes": site.nodes, "pause_s": site.pause_s}
        print(json.dumps(row | simulate(site)), flush=True)


if __name__ == "__main__":
    main()
