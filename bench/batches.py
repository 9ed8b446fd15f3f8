"""Throughput of a batch, beside the same requests sent live by many clients.

    python bench/batches.py --rows 10000 --tokens 16

Both run in one server each time, one after the other, with the scripted engine, which computes nothing: what is
measured is the server. As many clients send the live requests as rows run at once, with aiohttp, which costs the
machine little.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import httpx
import psutil

_PATH = "/v1/chat/completions"


def _body(number: int, num_tokens: int) -> dict[str, object]:
    messages = [{"role": "user", "content": f"Row {number}"}]
    return {"messages": messages, "max_tokens": num_tokens, "seed": number}


@contextlib.contextmanager
def _server(source: str, directory: Path, at_once: int) -> Iterator[tuple[str, psutil.Process]]:
    command = [
        str(Path(sys.executable).parent / "tailrace"), "serve", source, "--port", "0", "--data-dir", str(directory),
        "--batch-rows-at-once", str(at_once), "--max-sequences", str(at_once),
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("Listening on "):
                yield line.split()[-1], psutil.Process(process.pid)
                return
        raise SystemExit("The server did not start.")
    finally:
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        process.wait()


def _cpu_s(server: psutil.Process) -> float:
    """Return the processor time of the server and its engine."""
    times = [one.cpu_times() for one in (server, *server.children())]
    return sum(one.user + one.system for one in times)


async def _live_s(url: str, num_rows: int, num_tokens: int, at_once: int) -> float:
    """Return how long the requests take if they are sent live."""
    left = iter(range(num_rows))
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=at_once)) as client:

        async def send() -> None:
            for number in left:
                async with client.post(_PATH, json=_body(number, num_tokens)) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.json()

        began_s = time.monotonic()
        await asyncio.gather(*(send() for _ in range(at_once)))
        return time.monotonic() - began_s


def _batch_s(url: str, num_rows: int, num_tokens: int) -> float:
    """Return how long a batch takes, from its creation to its end."""
    rows = "".join(
        json.dumps({"custom_id": str(one), "method": "POST", "url": _PATH, "body": _body(one, num_tokens)}) + "\n"
        for one in range(num_rows)
    )
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
        file = client.post("/v1/files", files={"file": ("rows.jsonl", rows)}, data={"purpose": "batch"}).json()
        asked = {"input_file_id": file["id"], "endpoint": _PATH, "completion_window": "24h"}
        began_s = time.monotonic()
        batch = client.post("/v1/batches", json=asked).json()
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            time.sleep(0.1)
            batch = client.get(f"/v1/batches/{batch['id']}").json()
        took_s = time.monotonic() - began_s
        assert batch["request_counts"] == {"total": num_rows, "completed": num_rows, "failed": 0}, batch
        lines = client.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
        assert [json.loads(line)["custom_id"] for line in lines] == [str(one) for one in range(num_rows)]
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--source", default="scripted")
    given = parser.parse_args()
    ratios, cpu_ratios = [], []
    for _ in range(given.rounds):
        with (
            tempfile.TemporaryDirectory() as folder,
            _server(given.source, Path(folder), given.at_once) as (url, server),
        ):
            cpu_s = [_cpu_s(server)]
            live_s = asyncio.run(_live_s(url, given.rows, given.tokens, given.at_once))
            cpu_s.append(_cpu_s(server))
            batch_s = _batch_s(url, given.rows, given.tokens)
            cpu_s.append(_cpu_s(server))
        ratios.append(live_s / batch_s)
        cpu_ratios.append((cpu_s[1] - cpu_s[0]) / (cpu_s[2] - cpu_s[1]))
        for name, took_s, used_s in (("live", live_s, cpu_s[1] - cpu_s[0]), ("batch", batch_s, cpu_s[2] - cpu_s[1])):
            cost = f"{1000 * used_s / given.rows:.2f} ms of processor time a row"
            print(f"{name:5} {given.rows / took_s:7.1f} rows/s, {cost}")
    print(f"median ratio of rows/s {statistics.median(ratios):.3f}, of cost {statistics.median(cpu_ratios):.3f}")


if __name__ == "__main__":
    main()
