"""Servers that share a Redis, and readers that are cut off and come back to any of them."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from tests.api.oracle import Answer
from tests.api.process import Server
from tests.faults.cables import Entry
from tests.faults.house import Door, Follower, Stream
from tests.testing.redis_server import OwnRedis, own_redis

__all__ = ["LEASE_S", "PACED", "Team", "team"]

PACED = "scripted:tokens_per_s=100"
LEASE_S = 3
ServerT = TypeVar("ServerT", bound=Server)


class Team(Generic[ServerT]):
    """Servers over one Redis. Readers come to any of them, or to the `entry` in front of them."""

    def __init__(
        self,
        directory: Path,
        url: str,
        launch: Callable[..., ServerT],
        *,
        seed: int,
        source: str = PACED,
        entry: Entry | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        self.chance = random.Random(seed)
        self.streams: list[Stream] = []
        self.is_open = True
        self.servers: list[ServerT] = []
        self.entry = entry
        self._launch = launch
        self._source = source
        self._directory = directory
        self._flags = ("--journal", url, "--lease-s", str(LEASE_S), *flags)
        self._logs: list[str] = []
        self._moved = threading.Condition()
        self._num_started = 0

    def launch(self, *source: str, **where: object) -> ServerT:
        """Start a server, which belongs to the team when it is in `servers`."""
        self._num_started += 1
        records = self._directory / f"server-{self._num_started}"
        return self._launch(*(source or (self._source,)), *self._flags, "--data-dir", str(records), **where)

    def add(self, **where: object) -> ServerT:
        server = self.launch(**where).wait_ready()
        self.servers.append(server)
        return server

    @property
    def server(self) -> Door:
        return self.entry or self.chance.choice(self.servers)

    @property
    def log(self) -> str:
        return "".join([*self._logs, *(server.log for server in self.servers)])

    def wait_moved(self) -> None:
        with self._moved:
            self._moved.wait(0.05)

    def begin(self, answer: Answer, *, on: Server | None = None, num_readers: int = 2) -> Stream:
        body = {"prompt": answer.prompt, "max_tokens": answer.count, "seed": answer.seed}
        stream_id = (on or self.entry or self.chance.choice(self.servers)).create(body)
        stream = Stream(stream_id, answer, [Follower(self, stream_id) for _ in range(num_readers)])
        self.streams.append(stream)
        return stream

    def begin_some(self, prompt: str, count: int, num_tokens: int, *, on: Server | None = None) -> list[Stream]:
        """Begin streams, and wait until their readers have seen some events."""
        streams = [self.begin(Answer(f"{prompt} {seed}.", num_tokens, seed), on=on) for seed in range(count)]
        for stream in streams:
            stream.seen(5)
        return streams

    def kill(self, server: ServerT) -> None:
        self.servers.remove(server)
        server.send_signal(signal.SIGKILL)
        server.wait()
        self._close(server)

    def stop(self, server: ServerT) -> int:
        self.servers.remove(server)
        server.send_signal(signal.SIGTERM)
        status = server.wait()
        self._close(server)
        return status

    def _close(self, server: ServerT) -> None:
        self._logs.append(server.log)
        server.close()

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
def team(
    directory: Path, *, size: int = 2, seed: int = 1, source: str = PACED, flags: Sequence[str] = ()
) -> Iterator[tuple[Team[Server], OwnRedis]]:
    """Servers on loopback. Leaving it checks all streams."""
    with own_redis(directory / "redis") as (url, redis):
        servers = Team(directory, url, Server, seed=seed, source=source, flags=flags)
        try:
            starting = [servers.launch() for _ in range(size)]
            servers.servers += [server.wait_ready() for server in starting]
            yield servers, redis
            servers.check()
        finally:
            servers.close()
