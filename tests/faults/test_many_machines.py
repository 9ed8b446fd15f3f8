"""Three servers on networks of their own, one Redis, and HAProxy in front: nobody notices when any of them goes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.api.oracle import Answer
from tests.faults.apart import apart
from tests.faults.cables import HUB, Cable, CabledServer, Entry, cables, entry
from tests.faults.team import Team
from tests.testing.redis_server import OwnRedis, own_redis
from tests.waiting import until

DEATHS = int(os.environ.get("TAILRACE_TEST_DEATHS", "12"))
NUM_TOKENS = 150
DECLARED_DEAD = "its streams are taken over"


class Machines(Team[CabledServer]):
    """A team of servers with a cable each."""

    def rejoin(self, cable: Cable) -> None:
        self.add(cable=cable)

    def wait_complete(self) -> None:
        """Wait until every server sees the others. One that comes back late from an earlier fault, with a dead lease,
        could not be declared dead again."""
        shown = f"\ntailrace_servers {len(self.servers)}.0\n"
        for server in self.servers:
            until(lambda server=server: shown in server.http.get("/metrics").text)  # type: ignore[misc]

    def wait_taken_over(self, absent: CabledServer, since: dict[CabledServer, int]) -> None:
        """Wait until one of the others says that the absent server is dead."""
        others = [server for server in self.servers if server is not absent]
        until(lambda: any(server.log.count(DECLARED_DEAD) > since[server] for server in others))

    def counts(self) -> dict[CabledServer, int]:
        return {server: server.log.count(DECLARED_DEAD) for server in self.servers}


@contextmanager
def machines(directory: Path, *flags: str, seed: int = 1) -> Iterator[tuple[Machines, Entry, OwnRedis]]:
    """Leaving it checks all streams."""
    file = ("--appendonly", "yes", "--bind", "127.0.0.1", HUB, "--protected-mode", "no")
    with cables(3) as some, entry(directory, some) as door, own_redis(directory / "redis", *file) as (url, redis):
        url = url.replace("127.0.0.1", HUB)
        servers = Machines(directory, url, CabledServer, seed=seed, entry=door, flags=flags or ("--drain-s", "0.2"))
        try:
            starting = [servers.launch(cable=cable) for cable in some]
            servers.servers += [server.wait_ready() for server in starting]
            until(lambda: door.http.get("/readyz").status_code == 200)
            yield servers, door, redis
            servers.check()
        finally:
            servers.close()


def kill(servers: Machines, victim: CabledServer, redis: OwnRedis) -> None:
    servers.kill(victim)
    servers.rejoin(victim.cable)


def freeze(servers: Machines, victim: CabledServer, redis: OwnRedis) -> None:
    """For longer than the lease."""
    servers.wait_complete()
    before = servers.counts()
    victim.send_signal(signal.SIGSTOP)
    servers.wait_taken_over(victim, before)
    victim.send_signal(signal.SIGCONT)


def pull(servers: Machines, victim: CabledServer, redis: OwnRedis) -> None:
    servers.wait_complete()
    before = servers.counts()
    victim.cable.pull()
    servers.wait_taken_over(victim, before)
    victim.cable.plug()


def kill_redis(servers: Machines, victim: CabledServer, redis: OwnRedis) -> None:
    redis.restart()


FAULTS: tuple[Callable[[Machines, CabledServer, OwnRedis], None], ...] = (kill, kill, freeze, pull, kill_redis)


@pytest.mark.deep
@pytest.mark.timeout(3600)
@apart
def test_deaths_at_any_time(tmp_path: Path) -> None:
    """TAILRACE_TEST_DEATHS says how many."""
    with machines(tmp_path) as (servers, _, redis):
        for death in range(DEATHS):
            streams = [
                servers.begin(Answer(f"Death {death}, {seed}.", NUM_TOKENS, seed), num_readers=1 + seed % 2)
                for seed in range(4)
            ]
            streams[0].seen(servers.chance.randint(1, 100))
            for stream in servers.streams[:-8]:
                stream.wait()
            fault = FAULTS[death % len(FAULTS)]
            fault(servers, servers.chance.choice(servers.servers), redis)


@pytest.mark.deep
@pytest.mark.timeout(600)
@apart
def test_a_rolling_restart_is_not_noticed(tmp_path: Path) -> None:
    """Under load, with clients that do not resume beside those that do: no request is refused, no answer is cut off."""
    with machines(tmp_path, "--shutdown-delay-s", "2", "--drain-s", "15") as (servers, door, _):
        is_over = threading.Event()
        plain = [_Plain(door, number, is_over) for number in range(4)]
        number = 0
        for victim in list(servers.servers):
            for _ in range(4):
                number += 1
                servers.begin(Answer(f"Roll {number}.", NUM_TOKENS, number), num_readers=1)
            assert servers.stop(victim) == 0
            servers.rejoin(victim.cable)
        is_over.set()
        for client in plain:
            client.check()
        servers.check()
        assert door.failures == []


class _Plain:
    """A client that knows nothing of resuming, and asks one question after the other."""

    def __init__(self, door: Entry, number: int, is_over: threading.Event) -> None:
        self._door = door
        self._answer = Answer(f"Plain {number}.", NUM_TOKENS if number % 2 else 10, number)  # 10: many requests
        self._is_over = is_over
        self._num_answers = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = {"prompt": self._answer.prompt, "max_tokens": self._answer.count, "seed": self._answer.seed}
        try:
            while not self._is_over.is_set():
                answer = self._door.http.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["text"] == self._answer.text
                self._num_answers += 1
        except BaseException as error:  # shown by `check`
            self._failure = error

    def check(self) -> None:
        self._thread.join()
        assert self._failure is None, repr(self._failure)
        assert self._num_answers


@pytest.mark.deep
@apart
def test_a_cable_is_pulled(tmp_path: Path) -> None:
    """A server that is cut off loses its streams to the others, and takes part again when it is back."""
    with machines(tmp_path) as (servers, _, redis):
        streams = [servers.begin(Answer(f"Pull {seed}.", 500, seed), num_readers=1) for seed in range(6)]
        for stream in streams:
            stream.seen(5)
        victim = servers.servers[0]
        pull(servers, victim, redis)
        victim.wait_line("Other servers took the streams of this server over")
        for stream in streams:
            stream.wait()
        until(lambda: victim.http.get("/readyz").status_code == 200)
