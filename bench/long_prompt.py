"""Measures what a prompt of 6,000 tokens does to others on a running server.

    python bench/long_prompt.py PORT [--rounds 3]

A stream runs; a long prompt follows a second later, and a short one 0.3 s after it. It prints the time to the first
token of the long prompt alone on an idle server (`cold_s`) and beside the stream (`long_s`), that of the short one, and
the gaps between the stream's tokens until the long prompt was read. Prompts are random token ids, so nothing is cached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from itertools import pairwise

import httpx

LONG, SHORT = 6000, 40
HEAD_START_S, BEHIND_S = 1.0, 0.3


async def read(client: httpx.AsyncClient, model: str, num_prompt: int, max_tokens: int, times_s: list[float]) -> None:
    """Append the seconds to each token of an answer."""
    body = {
        "model": model,
        "prompt": random.choices(range(1000, 40_000), k=num_prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    begun_s = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.is_error:
            raise SystemExit((await response.aread()).decode())
        async for line in response.aiter_lines():
            now_s = time.perf_counter() - begun_s
            if line.startswith("data: {"):
                times_s += [now_s for choice in json.loads(line[6:])["choices"] if choice["text"]]


async def measure(client: httpx.AsyncClient, model: str) -> dict[str, float]:
    """Run one round. Returns seconds by name."""
    cold: list[float] = []
    await read(client, model, LONG, 2, cold)
    stream: list[float] = []
    long: list[float] = []
    short: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(read(client, model, SHORT, 2000, stream))
        await asyncio.sleep(HEAD_START_S)
        reading = tasks.create_task(read(client, model, LONG, 2, long))
        await asyncio.sleep(BEHIND_S)
        await read(client, model, SHORT, 2, short)
        await reading
        running.cancel()
    end_s = HEAD_START_S + long[0]
    gaps = [after - before for before, after in pairwise(stream) if after > HEAD_START_S and before < end_s]
    return {
        "cold_s": cold[0],
        "long_s": long[0],
        "short_s": short[0],
        "gap_p50_s": statistics.median(gaps),
        "gap_max_s": max(gaps),
        "tokens_meanwhile": len(gaps),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a prompt of 6,000 tokens beside other requests.")
    parser.add_argument("port", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    address = f"http://127.0.0.1:{options.port}"
    async with httpx.AsyncClient(base_url=address, timeout=600, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        rounds = [await measure(client, model) for _ in range(options.rounds)]
    for name in rounds[0]:
        values = [one[name] for one in rounds]
        print(f"{name:18} {statistics.median(values):8.3f}   {', '.join(f'{value:.3f}' for value in values)}")


if __name__ == "__main__":
    asyncio.run(main())
