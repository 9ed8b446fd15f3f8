"""What metrics and traces cost: one server without them, one with metrics, one with metrics and traces, in turns.

    python bench/observing.py [--loads 64x500,16x50] [--turns 12] [--turn-s 2] [--scrape-s 15]

All run the scripted engine at full speed, with a journal in memory. 64x500: 64 clients, each of which sends one
streamed chat of 500 tokens after the other. The server without metrics calls no observer that counts, and looks for no
stalls. `/metrics` of the others is read every 15 s, and a collector takes the traces. The rates are medians of the
turns. The processor times are those of the servers' own processes: the least ones, because other work on the machine
can only add to them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from machine import this_machine
from servers import RunningServer, serving
from versions import Load, measure

# Python runs it as it starts.
_WITHOUT = """
from tailrace.api.server_metrics import Metrics
from tailrace.generation.observers import Observers
from tailrace.generation.stalls import StallWatch
import asyncio

add = Observers.add
Observers.add = lambda self, observer: None if isinstance(observer, Metrics) else add(self, observer)

async def forever(self):
    await asyncio.Event().wait()

StallWatch.run = forever
"""


class _Sink(BaseHTTPRequestHandler):
    """A collector that takes everything."""

    num_spans = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        _Sink.num_spans += 1
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the library's name
        pass


@contextlib.contextmanager
def collector() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Sink) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextlib.contextmanager
def read_metrics(servers: list[RunningServer], period_s: float) -> Iterator[None]:
    """Read /metrics of servers, as Prometheus does."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(period_s):
            for server in servers:
                with urllib.request.urlopen(f"{server.url}/metrics") as answer:
                    answer.read()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description="What metrics and traces cost.")
    parser.add_argument("--loads", default="64x500,16x50", help="clients x tokens of each answer")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--turn-s", type=float, default=2.0)
    parser.add_argument("--scrape-s", type=float, default=15.0)
    options = parser.parse_args()
    flags = ("--journal", "memory")
    print(json.dumps(this_machine()))
    with contextlib.ExitStack() as up:
        without = Path(up.enter_context(tempfile.TemporaryDirectory()))
        (without / "sitecustomize.py").write_text(_WITHOUT)
        sources = Path(__file__).resolve().parent.parent / "src"
        servers = {
            "without": up.enter_context(serving("scripted", *flags, sources=Path(f"{without}:{sources}"))),
            "metrics": up.enter_context(serving("scripted", *flags, sources=sources)),
            "metrics and traces": up.enter_context(
                serving("scripted", *flags, "--otlp", up.enter_context(collector()), sources=sources)
            ),
        }
        with urllib.request.urlopen(f"{servers['without'].url}/metrics") as answer:
            assert b'tailrace_requests_total{model="scripted"} 0.0' in answer.read()
        up.enter_context(read_metrics([servers["metrics"], servers["metrics and traces"]], options.scrape_s))
        for load in options.loads.split(","):
            num_clients, num_tokens = map(int, load.split("x"))
            found: dict[str, list[Load]] = {name: [] for name in servers}
            for server in servers.values():
                measure(server, num_clients, num_tokens, 0.5)
            for turn in range(options.turns):
                for name in list(servers)[:: -1 if turn % 2 else 1]:
                    found[name].append(measure(servers[name], num_clients, num_tokens, options.turn_s))
                    time.sleep(0.2)
            first = found["without"]
            for name, loads in found.items():
                rate = statistics.median(one.events_per_s for one in loads)
                ratio = statistics.median(
                    one.events_per_s / beside.events_per_s for one, beside in zip(loads, first, strict=True)
                )
                cpu_us = min(one.cpu_us for one in loads)
                base_us = min(one.cpu_us for one in first)
                print(
                    f"{load}, {name}: events/s {rate:,.0f} ({ratio:.3f} of a turn without), "
                    f"processor time {cpu_us:.2f} µs an event ({cpu_us / base_us:.3f})",
                    flush=True,
                )
        with urllib.request.urlopen(f"{servers['without'].url}/metrics") as answer:
            assert b'tailrace_requests_total{model="scripted"} 0.0' in answer.read(), "it counted"
    print(f"the collector got {_Sink.num_spans} requests")


if __name__ == "__main__":
    main()
