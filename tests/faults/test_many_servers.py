"""Servers that share a Redis: each stream outlives the server that writes it, and every reader sees one text."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.faults.house import Follower, Stream
from tests.testing.redis_server import OwnRedis, own_redis
from tests.waiting import until

PACED = "scripted:tokens_per_s=100"
LEASE_S = 3


class Team:
    """Servers over one Redis. A reader that is cut off comes back to any of them."""

    def __init__(self, directory: Path, url: str, *, size: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.streams: list[Stream] = []
        self.is_open = True
        self.servers: list[Server] = []
        self._directory = directory
        self._url = url
        self._logs: list[str] = []
        self._moved = threading.Condition()
        self._num_started = 0
        starting = [self._launch() for _ in range(size)]
        self.servers = [server.wait_ready() for server in starting]

    def _launch(self) -> Server:
        self._num_started += 1
        records = self._directory / f"server-{self._num_started}"
        flags = ("--journal", self._url, "--lease-s", str(LEASE_S), "--data-dir", str(records))
        return Server(PACED, *flags)

    @property
    def server(self) -> Server:
        return self.chance.choice(self.servers)

    @property
    def log(self) -> str:
        return "".join([*self._logs, *(server.log for server in self.servers)])

    def wait_moved(self) -> None:
        with self._moved:
            self._moved.wait(0.05)

    def begin(self, answer: Answer, *, on: Server | None = None, num_readers: int = 2) -> Stream:
        body = {"prompt": answer.prompt, "max_tokens": answer.count, "seed": answer.seed}
        stream_id = (on or self.server).create(body)
        stream = Stream(stream_id, answer, [Follower(self, stream_id) for _ in range(num_readers)])
        self.streams.append(stream)
        return stream

    def begin_some(self, prompt: str, count: int, num_tokens: int, *, on: Server | None = None) -> list[Stream]:
        """Begin streams, and wait until their readers have seen some events."""
        streams = [self.begin(Answer(f"{prompt} {seed}.", num_tokens, seed), on=on) for seed in range(count)]
        for stream in streams:
            stream.seen(5)
        return streams

    def kill(self, server: Server) -> None:
        self.servers.remove(server)
        server.send_signal(signal.SIGKILL)
        server.wait()
        self._close(server)

    def stop(self, server: Server) -> int:
        self.servers.remove(server)
        server.send_signal(signal.SIGTERM)
        status = server.wait()
        self._close(server)
        return status

    def _close(self, server: Server) -> None:
        self._logs.append(server.log)
        server.close()

    def add(self) -> Server:
        server = self._launch().wait_ready()
        self.servers.append(server)
        return server

    def check(self) -> None:
        """Wait for all streams, and hold laws 1 to 3 for them."""
        for stream in self.streams:
            stream.wait()
        for stream in self.streams:
            stream.check(None)

    def close(self) -> None:
        self.is_open = False
        for server in self.servers:
            server.send_signal(signal.SIGCONT)
            server.close()


@contextmanager
def team(directory: Path, *, size: int = 2, seed: int = 1) -> Iterator[tuple[Team, OwnRedis]]:
    (directory / "redis").mkdir()
    with own_redis(directory / "redis") as (url, redis):
        servers = Team(directory, url, size=size, seed=seed)
        try:
            yield servers, redis
            servers.check()
        finally:
            servers.close()


@pytest.mark.parametrize(
    ("size", "num_kills"),
    [(2, 1), pytest.param(3, 30, marks=[pytest.mark.deep, pytest.mark.timeout(1200)])],
)
def test_killed_at_any_time(tmp_path: Path, size: int, num_kills: int) -> None:
    with team(tmp_path, size=size) as (servers, _):
        for kill in range(num_kills):
            streams = [servers.begin(Answer(f"Kill {kill} {seed}.", 150, seed)) for seed in range(4)]
            streams[0].seen(servers.chance.randint(1, 100))
            for stream in servers.streams[:-8]:
                stream.wait()
            servers.kill(servers.server)
            servers.add()


def test_frozen_for_longer_than_the_lease(tmp_path: Path) -> None:
    with team(tmp_path) as (servers, _):
        frozen, other = servers.servers
        streams = servers.begin_some("Freeze", 3, 600, on=frozen)
        frozen.send_signal(signal.SIGSTOP)
        other.wait_line("its streams are taken over")
        until(lambda: all(other.http.get(stream.path).json()["text"] for stream in streams))
        time.sleep(1.0)  # the other server writes on meanwhile
        frozen.send_signal(signal.SIGCONT)
        frozen.wait_line("Other servers took the streams of this server over")
        for stream in streams:
            stream.wait()
        assert frozen.http.get("/readyz").status_code == 200
        servers.begin(Answer("Afterwards.", 20, seed=1), on=frozen).wait()


def test_a_rolling_restart_loses_nothing(tmp_path: Path) -> None:
    with team(tmp_path) as (servers, _):
        old = list(servers.servers)
        for _ in old:
            servers.add()
        streams = [stream for server in old for stream in servers.begin_some("Roll", 2, 600, on=server)]
        for server in old:
            assert servers.stop(server) == 0
        for stream in streams:
            stream.wait()
            assert b'"continuity":"replayed"' in stream.end


def test_redis_does_not_answer_for_a_while(tmp_path: Path) -> None:
    with team(tmp_path) as (servers, redis):
        servers.begin_some("Pause", 4, 300)
        redis.stop()
        time.sleep(1.5)
        redis.go_on()


def test_redis_forgets_everything(tmp_path: Path) -> None:
    """The servers write again what their streams have."""
    with team(tmp_path) as (servers, redis):
        servers.begin_some("Forget", 4, 300)
        redis.restart()


def test_stopped_by_a_server_that_does_not_write_it(tmp_path: Path) -> None:
    with team(tmp_path) as (servers, _):
        one, other = servers.servers
        stream = servers.begin(Answer("Stop.", 5000, seed=1), on=one)
        stream.ends = ("cancelled",)
        stream.seen(5)
        assert other.post(f"{stream.path}/cancel", {}).status_code == 200
        until(lambda: one.http.get(stream.path).json()["status"] == "cancelled")  # it may hear of it a moment later
