"""Measures the memory of idle readers: the server's memory with them, less its memory without.

    .venv/bin/python bench/idle.py --readers 5000
    .venv/bin/python bench/idle.py --readers 5000 --streams 1

It starts a server with default settings on loopback. The engine is so slow that after the first token there are only
heartbeats. The streams run before the first measurement, so the growth is only that of readers. The clients are in this
process. The kernel's memory for sockets is not included.
"""

from __future__ import annotations

import argparse
import json
import resource
import selectors
import socket
import time
import urllib.request

import psutil

from servers import serving

_SLOW = "scripted:tokens_per_s=0.001"
_AT_ONCE = 200  # clients that connect together; a burst of a thousand would not measure idle readers


def create(port: int, number: int) -> str:
    body = json.dumps({"prompt": f"Idle {number}.", "max_tokens": 100, "linger_s": 3600}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/streams", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["id"])


def follow(port: int, paths: list[str]) -> list[socket.socket]:
    """Return a connected reader for each path, after its first event."""
    readers: list[socket.socket] = []
    for begin in range(0, len(paths), _AT_ONCE):
        waiting = selectors.DefaultSelector()
        for path in paths[begin : begin + _AT_ONCE]:
            reader = socket.create_connection(("127.0.0.1", port))
            reader.sendall(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: text/event-stream\r\n\r\n".encode())
            waiting.register(reader, selectors.EVENT_READ, bytearray())
            readers.append(reader)
        while waiting.get_map():
            for key, _ in waiting.select():
                assert isinstance(key.fileobj, socket.socket)
                key.data.extend(key.fileobj.recv(1 << 16))
                assert key.data.startswith(b"HTTP/1.1 200"[: len(key.data)]), bytes(key.data)
                if b"\nid: " in key.data:
                    waiting.unregister(key.fileobj)
        waiting.close()
    return readers


def memory(process: psutil.Process) -> tuple[int, int]:
    """Return RSS and PSS, in bytes."""
    full = process.memory_full_info()
    return full.rss, full.pss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readers", type=int, default=5000)
    parser.add_argument("--streams", type=int, default=64, help="number of streams that the readers share")
    parser.add_argument(
        "--hold-s", type=float, default=25.0, help="how long they are idle; a heartbeat is sent every 10 s"
    )
    options, flags = parser.parse_known_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # for this process, and the server, which inherits it
    room = str(max(128, options.streams))
    flags += ["--max-sequences", room, "--max-concurrent-requests", room, "--kv-tokens", str(256 * int(room))]
    with serving(_SLOW, "--drain-s", "0", *flags) as server:
        process, port = server.process, server.port
        ids = [create(port, number) for number in range(options.streams)]
        paths = [f"/v1/streams/{ids[number % len(ids)]}/events" for number in range(options.readers)]
        follow(port, paths[:1])[0].close()  # memory that only the first request allocates does not count
        time.sleep(1)
        before = memory(process)
        readers = follow(port, paths)
        connected = memory(process)
        used_s = sum(process.cpu_times()[:2])
        time.sleep(options.hold_s)
        held = memory(process)
        used_s = sum(process.cpu_times()[:2]) - used_s
        for name, now in (("connected", connected), (f"after {options.hold_s:g} s", held)):
            rss, pss = (after - first for first, after in zip(before, now, strict=True))
            print(
                f"{options.readers} readers of {options.streams} streams, {name}: "
                f"RSS +{rss / 2**20:.1f} MiB ({rss / options.readers / 2**10:.1f} KiB each), "
                f"PSS +{pss / 2**20:.1f} MiB ({pss / options.readers / 2**10:.1f} KiB each)"
            )
        print(f"RSS without readers {before[0] / 2**20:.1f} MiB; {used_s / options.hold_s:.1%} of a core while idling")
        for reader in readers:
            reader.close()


if __name__ == "__main__":
    main()
