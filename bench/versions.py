"""Compares this version's server with an earlier version's, in turns.

    git worktree add --detach /tmp/before COMMIT
    python bench/versions.py /tmp/before/src [--loads 1x3000,8x500,32x200] [--turns 8] [--turn-s 2]

Both run the scripted engine at full speed, in this environment. 8x500: eight clients, each of which sends one streamed
chat of 500 tokens after the other on one connection. A turn is before, now, now, before, or the other way round. The
rates and the times to the first token are medians; the processor times of the servers' own processes are the least
ones, because other work on the machine can only add to them.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from servers import RunningServer, serving

_LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(frozen=True)
class Load:
    events_per_s: float
    cpu_us: float  # for an event
    ttft_s: float  # median


class Client:
    """One connection with one request at a time."""

    def __init__(self, port: int, request: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self._request = request
        self._tail = b""
        self._start_s: float | None = None
        self.num_events = 0
        self.ttfts_s: list[float] = []

    def send(self) -> None:
        self._tail, self._start_s = b"", time.perf_counter()
        self.socket.sendall(self._request)

    def receive(self) -> bool:
        """Return whether the answer is complete."""
        received = self.socket.recv(1 << 18)
        if not received or received.startswith(b"HTTP/1.1 4"):
            raise SystemExit(f"The server refused: {received[:500]!r}")
        num_events = received.count(b"data: {")
        if num_events and self._start_s is not None:
            self.ttfts_s.append(time.perf_counter() - self._start_s)
            self._start_s = None
        self.num_events += num_events
        self._tail = (self._tail + received)[-len(_LAST_CHUNK) :]
        return self._tail == _LAST_CHUNK


def measure(server: RunningServer, num_clients: int, num_tokens: int, turn_s: float) -> Load:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": num_tokens, "stream": True}
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    clients = [Client(server.port, request) for _ in range(num_clients)]
    cpu_s, start_s = server.cpu_s(), time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.socket, selectors.EVENT_READ, client)
            client.send()
        while selector.get_map():
            for key, _ in selector.select():
                if key.data.receive():
                    if time.perf_counter() < start_s + turn_s:
                        key.data.send()
                    else:
                        selector.unregister(key.fileobj)
    wall_s, cpu_s = time.perf_counter() - start_s, server.cpu_s() - cpu_s
    for client in clients:
        client.socket.close()
    num_events = sum(client.num_events for client in clients)
    ttfts_s = [ttft_s for client in clients for ttft_s in client.ttfts_s]
    return Load(num_events / wall_s, 1e6 * cpu_s / num_events, statistics.median(ttfts_s))


def main() -> None:
    parser = argparse.ArgumentParser(description="This version's server against an earlier version's.")
    parser.add_argument("before", type=Path, help="the folder src of the earlier version")
    parser.add_argument("--loads", default="1x3000,8x500,32x200", help="clients x tokens of each answer")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--turn-s", type=float, default=2.0)
    options = parser.parse_args()
    with ExitStack() as up:
        here = Path(__file__).resolve().parent.parent / "src"
        before, now = (up.enter_context(serving("scripted", sources=path)) for path in (options.before, here))
        for load in options.loads.split(","):
            num_clients, num_tokens = map(int, load.split("x"))
            found: dict[RunningServer, list[Load]] = {before: [], now: []}
            for server in found:
                measure(server, num_clients, num_tokens, 0.5)
            for turn in range(options.turns):
                for server in (before, now, now, before) if turn % 2 else (now, before, before, now):
                    found[server].append(measure(server, num_clients, num_tokens, options.turn_s))
            rates, ttfts_s = (
                [statistics.median(getattr(one, name) for one in found[server]) for server in (before, now)]
                for name in ("events_per_s", "ttft_s")
            )
            cpus_us = [min(one.cpu_us for one in found[server]) for server in (before, now)]
            print(
                f"{load}: events/s {rates[0]:,.0f}, now {rates[1]:,.0f} ({rates[1] / rates[0]:.2f}); "
                f"processor time {cpus_us[0]:.2f} µs an event, now {cpus_us[1]:.2f} ({cpus_us[1] / cpus_us[0]:.2f}); "
                f"first token {1000 * ttfts_s[0]:.1f} ms, now {1000 * ttfts_s[1]:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
