"""Servers over one Redis whose clocks are minutes apart: streams go on, are taken over, and are not deleted early."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from tests.api.oracle import Answer
from tests.api.process import TAILRACE, Server
from tests.clocks import with_clock
from tests.faults.team import Team
from tests.testing.redis_server import own_redis
from tests.waiting import until

MINUTES_S = 420
RETENTION_S = 60  # less than that


class ClockedServer(Server):
    """A server whose clock is so far ahead."""

    def __init__(self, source: str, *flags: str, ahead_s: int) -> None:
        self.command = (*with_clock(ahead_s), TAILRACE)
        super().__init__(source, *flags)


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_clocks_are_minutes_apart(tmp_path: Path) -> None:
    with own_redis(tmp_path / "redis") as (url, _):
        flags = ("--retention-s", str(RETENTION_S))
        servers = Team(tmp_path, url, ClockedServer, seed=1, flags=flags)
        try:
            for ahead_s in (-MINUTES_S, MINUTES_S, 0):
                servers.add(ahead_s=ahead_s)
            behind, ahead, right = servers.servers
            done = servers.begin(Answer("Done.", 5, seed=1), on=behind)
            done.wait()
            for victim, ahead_s in ((right, 0), (behind, -MINUTES_S), (ahead, MINUTES_S)):
                streams = servers.begin_some(f"Clock {ahead_s}", 3, 300, on=victim)
                servers.kill(victim)
                for stream in streams:
                    stream.wait()
                    assert b'"continuity":"replayed"' in stream.end
                servers.add(ahead_s=ahead_s)
            right, behind, ahead = servers.servers
            for server in servers.servers:
                assert server.http.get(done.path).json()["status"] == "done"
                until(lambda server=server: server.http.get("/readyz").status_code == 200)  # type: ignore[misc]
            for server, ahead_s in ((behind, -MINUTES_S), (ahead, MINUTES_S)):
                assert abs(server.http.get("/readyz").json()["clock_offset_s"] - ahead_s) <= 2
                (shown,) = re.findall(r"\ntailrace_clock_offset_seconds (\S+)", server.http.get("/metrics").text)
                assert abs(float(shown) - ahead_s) <= 2
                server.wait_line(
                    rf"The clock of this server differs from that of Redis by {'-' if ahead_s < 0 else ''}4\d\d s"
                )
                created_s = server.http.get(servers.begin(Answer("Now.", 5, seed=1), on=server).path).json()["created"]
                assert abs(created_s - time.time() - ahead_s) < MINUTES_S / 2, "it has another clock"
            assert "clock_offset_s" not in right.http.get("/readyz").json()
            assert "The clock of this server" not in right.log
            servers.check()
        finally:
            servers.close()
