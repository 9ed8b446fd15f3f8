"""Three servers on networks of their own, one Redis, HAProxy in front, and what can happen to them.

Use it in a test of `apart`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.cables import HUB, Cable, CabledServer, Entry, cables, entry
from tests.faults.team import PACED, Team
from tests.testing.redis_server import OwnRedis, own_redis
from tests.waiting import LONG_S, until

__all__ = ["FAULTS", "Machines", "machines", "pull"]

_DECLARED_DEAD = "its streams are taken over"


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
        until(lambda: any(server.log.count(_DECLARED_DEAD) > since[server] for server in others))

    def counts(self) -> dict[CabledServer, int]:
        return {server: server.log.count(_DECLARED_DEAD) for server in self.servers}


@contextmanager
def machines(
    directory: Path, *flags: str, seed: int = 1, source: str = PACED, load_s: float = LONG_S
) -> Iterator[tuple[Machines, Entry, OwnRedis]]:
    """`load_s` is how long the model may take to load. Leaving it checks all streams."""
    file = ("--appendonly", "yes", "--bind", "127.0.0.1", HUB, "--protected-mode", "no")
    with cables(3) as some, entry(directory, some) as door, own_redis(directory / "redis", *file) as (url, redis):
        url = url.replace("127.0.0.1", HUB)
        # A Redis that is killed is back within 5 s, the default, but not on every busy machine.
        team_flags = flags or ("--drain-s", "0.2", "--journal-wait-s", "60")
        servers = Machines(directory, url, CabledServer, seed=seed, source=source, entry=door, flags=team_flags)
        try:
            starting = [servers.launch(cable=cable) for cable in some]
            servers.servers += [server.wait_ready(timeout_s=load_s) for server in starting]
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
