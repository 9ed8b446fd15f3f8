"""Measures the cost of keys: the check of a request's key among many, and reading all keys when the server starts. Also
measures whether the time of a refusal reveals what is wrong with a guessed key.

    .venv/bin/python bench/keys.py --keys 100000 --guesses 10000

The database is in memory (/dev/shm if it exists), so the disk is not measured. Guesses are sent to a server over
loopback, on one connection, in random order. "noise" is the difference between the medians of two random halves of the
same kind of guess: smaller differences mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from starlette.datastructures import Headers

from servers import serving
from tailrace.access.authentication import Authentication
from tailrace.errors import Unauthenticated
from tailrace.records.key_store import KeyStore
from tailrace.records.records_service import Records, open_database
from tailrace.settings import Settings
from tailrace_outer.measure.bench.load import percentile

_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
_SCOPE = {"type": "http", "method": "POST", "path": "/v1/streams", "query_string": b""}


def random_word(length: int) -> str:
    return "".join(random.choices(_ALPHABET, k=length))


def make_keys(settings: Settings, count: int) -> list[str]:
    """Create keys, and return their tokens."""
    database = open_database(settings)
    store = KeyStore(database)
    tokens = [store.create(f"owner{number % 1000}").token for number in range(count)]
    database.close()
    return tokens


def tokens_of_two_owners(settings: Settings, tokens: list[str]) -> list[str]:
    with contextlib.closing(open_database(settings)) as database:
        store = KeyStore(database)
        return list({store.get(token.split("_")[1]).owner: token for token in tokens[:50]}.values())[:2]


def read_keys(settings: Settings, rounds: int) -> tuple[Authentication, list[float]]:
    """Return the authentication with all keys, and the seconds of each reading."""
    taken_s = []
    for _ in range(rounds):
        records = Records(settings)
        started_s = time.perf_counter()
        asyncio.run(records.read_keys())
        taken_s.append(time.perf_counter() - started_s)
        records.close()
    return records.authentication, taken_s


def guesses_at(token: str) -> dict[str, str]:
    """Return guesses of a token, by what is wrong with them."""
    _, key_id, secret = token.split("_", 2)
    wrong = random_word(len(secret))
    return {"right": token, "wrong secret": f"tr_{key_id}_{wrong}", "wrong id": f"tr_{random_word(12)}_{wrong}"}


def time_checks(authentication: Authentication, tokens: list[str], count: int) -> dict[str, list[float]]:
    """Return the microseconds of `authenticate`, by kind of token."""
    taken_us: dict[str, list[float]] = {kind: [] for kind in guesses_at(tokens[0])}
    for _ in range(count):  # each time another key, so that none is in the processor's cache
        for kind, token in guesses_at(random.choice(tokens)).items():
            headers = Headers(raw=[(b"host", b"x"), (b"authorization", f"Bearer {token}".encode())])
            started_ns = time.perf_counter_ns()
            with contextlib.suppress(Unauthenticated):
                authentication.authenticate(_SCOPE, headers)
            taken_us[kind].append((time.perf_counter_ns() - started_ns) / 1e3)
    return taken_us


class Connection:
    """One connection to a server, kept open."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, method: str, path: str, token: str, body: bytes = b"") -> tuple[float, bytes]:
        """Return the microseconds of an answer, and the answer."""
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {token}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        started_ns = time.perf_counter_ns()
        self._socket.sendall(head.encode() + body)
        answer = b""
        while True:
            answer += self._socket.recv(65536)
            headers, found, rest = answer.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: ([0-9]+)", headers)
            if found and length and len(rest) >= int(length[1]):
                return (time.perf_counter_ns() - started_ns) / 1e3, answer


def time_guesses(settings: Settings, tokens: list[str], count: int) -> dict[str, list[float]]:
    """Return the microseconds of refusals over HTTP, by kind of guess."""
    own_token, other_token = tokens_of_two_owners(settings, tokens)
    with serving("scripted", "--database", settings.database, "--drain-s", "0") as server:
        connection = Connection(server.port)
        _, answer = connection.ask("POST", "/v1/streams", other_token, b'{"prompt": "Hi.", "max_tokens": 5}')
        stream_id = json.loads(answer.partition(b"\r\n\r\n")[2])["id"]
        kinds: dict[str, Callable[[], tuple[str, str]]] = {
            "wrong secret": lambda: ("/v1/models", guesses_at(random.choice(tokens))["wrong secret"]),
            "wrong id": lambda: ("/v1/models", guesses_at(random.choice(tokens))["wrong id"]),
            "another owner's stream": lambda: (f"/v1/streams/{(stream_id, random_word(22))[0]}", own_token),
            "no stream": lambda: (f"/v1/streams/{(stream_id, random_word(22))[1]}", own_token),
        }  # this process does the same work for each of them
        taken_us: dict[str, list[float]] = {kind: [] for kind in kinds}
        order = list(kinds) * count
        random.shuffle(order)
        for kind in order:
            took_us, answer = connection.ask("GET", *kinds[kind]())
            assert answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 404")), answer
            taken_us[kind].append(took_us)
        return taken_us


def noise_of(values: list[float]) -> float:
    shuffled = random.sample(values, len(values))
    half = len(shuffled) // 2
    return abs(statistics.median(shuffled[:half]) - statistics.median(shuffled[half:]))


def show(title: str, taken_us: dict[str, list[float]]) -> None:
    print(f"\n{title}: median, 99th percentile, noise (µs)")
    for kind, values in taken_us.items():
        ninety_ninth = percentile(values, 0.99)
        print(f"  {kind:<24}{statistics.median(values):9.2f}{ninety_ninth:9.2f}{noise_of(values):9.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--guesses", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5, help="readings of all keys")
    options = parser.parse_args()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        settings = Settings(database=f"sqlite:///{directory}/records.sqlite")
        tokens = make_keys(settings, options.keys)
        authentication, taken_s = read_keys(settings, options.rounds)
        print(f"{options.keys} keys are read in {statistics.median(taken_s):.2f} s (median of {options.rounds})")
        show(f"authenticate, {options.keys} keys", time_checks(authentication, tokens, options.guesses))
        show("refusals over HTTP", time_guesses(settings, tokens, options.guesses))


if __name__ == "__main__":
    main()
