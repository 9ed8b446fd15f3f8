"""Servers that share a Redis: each stream outlives the server that writes it, and every reader sees one text."""

from __future__ import annotations

import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.faults.laws import seq_of
from tests.faults.team import LEASE_S, PACED, team
from tests.testing.redis_server import own_redis
from tests.waiting import until


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
            servers.kill(servers.chance.choice(servers.servers))
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


@pytest.mark.deep
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


@pytest.mark.deep
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


@pytest.mark.deep
def test_the_other_server_has_other_weights_under_this_name(tmp_path: Path) -> None:
    """As two groups of servers on one prefix. It keeps what readers have seen, continues behind it, and says so."""
    answer = Answer("Weights.", 300, seed=1)
    with own_redis(tmp_path / "redis") as (url, _):
        flags = ("--journal", url, "--lease-s", str(LEASE_S))
        with (
            closing(Server(PACED, *flags, "--data-dir", str(tmp_path / "one"))) as one,
            closing(Server(f"{PACED},utf8=0", *flags, "--data-dir", str(tmp_path / "other"))) as other,
        ):
            one.wait_ready()
            other.wait_ready()
            stream_id = one.create({"prompt": answer.prompt, "max_tokens": answer.count, "seed": 1})
            path = f"/v1/streams/{stream_id}"
            until(lambda: len(other.http.get(path).json()["text"]) >= 100)
            seen = str(other.http.get(path).json()["text"])
            one.send_signal(signal.SIGKILL)
            one.wait()
            until(lambda: other.http.get(path).json()["status"] == "done")
            assert other.http.get(path).json()["text"].startswith(seen)
            content = other.http.get(f"{path}/events").content
            *deltas, end = [event + b"\n\n" for event in content.split(b"\n\n") if event]
            assert [seq_of(event) for event in deltas] == list(range(1, answer.count + 1))
            assert b'"continuity":"continued"' in end
            expected = answer.native(stream_id)
            assert deltas[:20] == expected[:20]
            assert deltas != expected[:-1]


@pytest.mark.deep
def test_a_server_with_other_models_is_shown(tmp_path: Path) -> None:
    with team(tmp_path, size=1) as (servers, redis):
        (server,) = servers.servers
        assert "servers_other_models" not in server.http.get("/readyz").json()
        flags = ("--model", f"more={PACED}", "--journal", redis.url, "--data-dir", str(tmp_path / "other"))
        with closing(Server(PACED, *flags)) as other:
            other.wait_ready()
            for one in (server, other):
                until(lambda one=one: one.http.get("/readyz").json().get("servers_other_models") == 1)  # type: ignore[misc]
                assert "\ntailrace_servers_other_models 1.0\n" in one.http.get("/metrics").text
            server.wait_line(r"A server with other models \(more, scripted\) shares this log store")
