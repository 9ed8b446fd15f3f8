"""Measures the cost of keys, quotas and records: a server with them and one without, in turns.

    python bench/access_cost.py [--source smollm2] [--starts 1] [--turns 7]

Both run the scripted engine at full speed, or a model. Of the scripted engine, requests are completions of one token,
16 at a time; events are those of 8 streams of 20,000 tokens as server-sent events. Of a model, it asks for streamed
answers of 16 tokens, 8 and 32 at a time. `--starts` says how often both servers are started. Each turn measures the
rate, and the processor time of the server's own process for each request or event, until the rows of the turn are in
the database. It prints the median rate, and the least processor time, because other work on the machine can only add
to it.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

from servers import RunningServer, serving
from tailrace.access.quota import Quota
from tailrace.records.key_store import KeyStore
from tailrace.records.record_database import RecordDatabase

_NUM_REQUESTS = 3000
_NUM_CLIENTS = 16
_NUM_STREAMS = 8
_NUM_TOKENS = 20_000
_NUM_ANSWERS = 32  # of a model, in each turn
_ANSWER_TOKENS = 16
_NAMES = ("without", "with")
_COUNT = "SELECT count(*) FROM requests"
_LARGE = Quota(requests_per_minute=10**9, tokens_per_minute=10**12, tokens_per_month=10**14, streams_at_once=10**6)


class _Server:
    def __init__(self, running: RunningServer, *, token: str = "", database: Path | None = None) -> None:
        self._port = running.port
        self.cpu_s = running.cpu_s
        self._database = sqlite3.connect(f"file:{database}?mode=ro", uri=True) if database is not None else None
        self._num_rows = 0
        self._headers = f"Authorization: Bearer {token}\r\n" if token else ""

    def wait_for_rows(self, count: int) -> None:
        """Wait until the database has the rows of all requests so far. It is read by this process."""
        self._num_rows += count
        while self._database is not None and self._database.execute(_COUNT).fetchone()[0] < self._num_rows:
            time.sleep(0.02)

    async def ask_many(self) -> tuple[int, int]:
        """Returns how many requests were answered, twice: each has a row."""
        body = b'{"model":"scripted","prompt":"Hi","max_tokens":1}'
        request = self._request("POST", "/v1/completions", body)

        async def ask() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            for _ in range(_NUM_REQUESTS // _NUM_CLIENTS):
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(head.decode())
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
            writer.close()

        await asyncio.gather(*(ask() for _ in range(_NUM_CLIENTS)))
        count = _NUM_REQUESTS // _NUM_CLIENTS * _NUM_CLIENTS
        return count, count

    async def answer(self, num_clients: int) -> tuple[int, int]:
        """Returns how many answers came, twice: each has a row."""
        for _ in range(_NUM_ANSWERS // num_clients):
            await self.stream(num_clients, _ANSWER_TOKENS)
        return _NUM_ANSWERS, _NUM_ANSWERS

    async def stream(self, num_streams: int = _NUM_STREAMS, num_tokens: int = _NUM_TOKENS) -> tuple[int, int]:
        """Returns how many events came, and the number of rows."""
        body = b'{"prompt":"Hi","max_tokens":%d,"stream":true,"ignore_eos":true}' % num_tokens
        request = self._request("POST", "/v1/completions", body)

        async def follow() -> int:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**20)
            writer.write(request)
            num_events = 0
            while b"[DONE]" not in (chunk := await reader.read(2**20)) and chunk:
                num_events += chunk.count(b"data: {")
            writer.close()
            return num_events

        return sum(await asyncio.gather(*(follow() for _ in range(num_streams)))), num_streams

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{self._headers}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


_Act = Callable[[_Server], Awaitable[tuple[int, int]]]


def _measure(server: _Server, act: _Act) -> tuple[float, float]:
    """Things a second, and microseconds of the server's processor for each, with their rows."""

    async def run() -> tuple[int, int]:
        return await act(server)

    cpu_s, start_s = server.cpu_s(), time.perf_counter()
    count, num_rows = asyncio.run(run())
    took_s = time.perf_counter() - start_s
    server.wait_for_rows(num_rows)
    return count / took_s, (server.cpu_s() - cpu_s) / count * 1e6


_SCRIPTED: dict[str, _Act] = {"requests": _Server.ask_many, "events": _Server.stream}
_MODEL: dict[str, _Act] = {
    "answers (8 at a time)": lambda server: server.answer(8),
    "answers (32 at a time)": lambda server: server.answer(32),
}
_Measurements = dict[tuple[str, str], list[tuple[float, float]]]


def _start_and_measure(source: str, acts: dict[str, _Act], num_turns: int, measurements: _Measurements) -> None:
    """Start both servers, and add the measurements of all turns by kind and server."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        path = Path(directory) / "records.sqlite"
        url = f"sqlite:///{path}"
        database = RecordDatabase(url)
        database.prepare()
        token = KeyStore(database).create("alice", quota=_LARGE).token
        database.close()
        many = ("--max-concurrent-requests", "1000")
        servers = {
            "without": _Server(stack.enter_context(serving(source, *many))),
            "with": _Server(stack.enter_context(serving(source, *many, "--database", url)), token=token, database=path),
        }
        for turn in range(num_turns + 1):
            for name, server in sorted(servers.items(), reverse=bool(turn % 2)):
                for kind, act in acts.items():
                    measured = _measure(server, act)
                    if turn:  # turn 0 warms up
                        measurements.setdefault((kind, name), []).append(measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="scripted")
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    acts = _SCRIPTED if args.source == "scripted" else _MODEL
    measurements: _Measurements = {}
    for _ in range(args.starts):
        _start_and_measure(args.source, acts, args.turns, measurements)
    for kind in acts:
        rates, costs = {}, {}
        for name in _NAMES:
            of_turns, costs_of_turns = zip(*measurements[kind, name], strict=True)
            rates[name], costs[name] = statistics.median(of_turns), min(costs_of_turns)
            print(f"{name:>8} keys: {rates[name]:10,.1f} {kind} a second, {costs[name]:7.2f} µs of the server for each")
        rate, cost = rates["with"] / rates["without"], costs["with"] / costs["without"]
        print(f"   ratio: {rate:.3f} of the rate, {cost:.3f} of the processor time")


if __name__ == "__main__":
    main()
