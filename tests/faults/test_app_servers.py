"""Servers of an app that share a Redis. A generator cannot move: what it has sent outlives its server, with one end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.api.process import Server
from tests.apps.process import AppServer, write
from tests.faults.house import Follower
from tests.faults.laws import status_of
from tests.faults.team import LEASE_S, PACED, Team
from tests.http.wire import as_json, sse_data, sse_ids
from tests.testing.redis_server import OwnRedis, own_redis
from tests.waiting import until

_APP = """
import asyncio, os
from starlette.requests import Request
from tailrace import serve


async def numbers(to):
    try:
        for number in range(to):
            yield {"number": number}
            await asyncio.sleep(0.01)
    finally:
        with open("stopped", "a") as stopped:
            stopped.write(f"{os.getppid()}\\n")


@serve.deployment(max_ongoing_requests=50, graceful_shutdown_timeout_s=float(os.environ.get("DRAIN_S", "0.2")))
class Counting:
    async def __call__(self, request: Request):
        return serve.stream(numbers(int(request.query_params["to"])))


app = Counting.bind()
"""

_ENDLESS = 1_000_000


@contextmanager
def _team(directory: Path, *, size: int = 2) -> Iterator[tuple[Team[AppServer], OwnRedis]]:
    write(directory, "counting.py", _APP)
    with own_redis(directory / "redis") as (url, redis):
        launch = partial(AppServer, directory=directory)
        servers = Team(directory, url, launch, seed=1, source="counting:app")
        try:
            starting = [servers.launch() for _ in range(size)]
            servers.servers += [server.wait_ready() for server in starting]
            yield servers, redis
        finally:
            servers.close()


def _begin(servers: Team[AppServer], on: AppServer, to: int = _ENDLESS) -> tuple[str, list[Follower]]:
    """Begin a stream. Returns its path, and readers that come to any server and have seen some events."""
    with on.http.stream("GET", "/", params={"to": to}) as answer:
        stream_id = answer.headers["x-stream-id"]
        followers = [Follower(servers, stream_id) for _ in range(3)]
        for follower in followers:
            follower.wait_events(3)
    return f"/v1/streams/{stream_id}", followers


def _check(followers: Sequence[Follower], *, end: str) -> None:
    """Every reader saw the same events without a gap, and one end."""
    for follower in followers:
        follower.wait()
        *items, last = follower.events
        assert [as_json(sse_data(item)[0])["number"] for item in items] == list(range(len(items)))
        assert [int(sse_ids(event)[0].rpartition("-")[2]) for event in follower.events] == list(
            range(1, len(items) + 2)
        )
        assert status_of(last) == end
        assert follower.events == followers[0].events


def test_killed(tmp_path: Path) -> None:
    with _team(tmp_path) as (servers, _):
        killed, other = servers.servers
        streams = [_begin(servers, killed) for _ in range(3)]
        kept = [_begin(servers, other, to=800) for _ in range(2)]
        servers.kill(killed)
        for path, followers in streams:
            _check(followers, end="interrupted")
            state = other.http.get(path).json()
            assert (state["status"], state["error"]["code"]) == ("interrupted", "interrupted")
            assert len(state["items"]) == len(followers[0].events) - 1
        for _, followers in kept:
            _check(followers, end="done")
        third = servers.add()
        path, _ = streams[0]
        assert third.http.get(path).json()["status"] == "interrupted"
        counted = "".join(server.http.get("/-/metrics").text for server in servers.servers)
        assert 'tailrace_app_streams_total{app="default",status="interrupted"} 3.0' in counted
        assert third.http.delete(path).status_code == 204
        assert other.http.get(path).status_code == 410


@pytest.mark.deep
def test_frozen_for_longer_than_the_lease(tmp_path: Path) -> None:
    with _team(tmp_path) as (servers, _):
        frozen, other = servers.servers
        path, followers = _begin(servers, frozen)
        frozen.send_signal(signal.SIGSTOP)
        other.wait_line("its streams are taken over")
        other.wait_state(path.rpartition("/")[2], "interrupted")
        frozen.send_signal(signal.SIGCONT)
        frozen.wait_line("Other servers took the streams of this server over")
        _check(followers, end="interrupted")
        until(lambda: (tmp_path / "stopped").exists())  # by the server that must not write it any more
        assert frozen.http.get(path).json() == other.http.get(path).json()
        assert 'status="interrupted"' not in frozen.http.get("/-/metrics").text
        _, afterwards = _begin(servers, frozen, to=20)
        _check(afterwards, end="done")


@pytest.mark.deep
def test_a_rolling_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that end while their server drains are not cut."""
    monkeypatch.setenv("DRAIN_S", "60")
    with _team(tmp_path) as (servers, _):
        old = list(servers.servers)
        for server in old:
            servers.add()
            _, followers = _begin(servers, server, to=300)
            assert servers.stop(server) == 0
            _check(followers, end="done")


@pytest.mark.deep
def test_stopped_in_the_middle(tmp_path: Path) -> None:
    """The server itself ends what does not end while it drains."""
    with _team(tmp_path) as (servers, _):
        stopped, other = servers.servers
        path, followers = _begin(servers, stopped)
        assert servers.stop(stopped) == 0
        _check(followers, end="interrupted")
        assert other.http.get(path).json()["status"] == "interrupted"
        assert "its streams are taken over" not in other.log


def test_cancelled_by_a_server_that_does_not_write_it(tmp_path: Path) -> None:
    with _team(tmp_path) as (servers, _):
        one, other = servers.servers
        path, followers = _begin(servers, one)
        assert other.http.post(f"{path}/cancel").json()["status"] == "cancelled"
        _check(followers, end="cancelled")
        until(lambda: (tmp_path / "stopped").exists())
        path, followers = _begin(servers, one)
        assert other.http.delete(path).status_code == 204
        for follower in followers:
            follower.wait(may_miss=True)
        assert {server.http.get(path).status_code for server in servers.servers} == {410}


@pytest.mark.deep
def test_redis_does_not_answer_for_a_while(tmp_path: Path) -> None:
    with _team(tmp_path) as (servers, redis):
        _, followers = _begin(servers, servers.servers[0], to=300)
        redis.stop()
        time.sleep(1.5)
        redis.resume()
        _check(followers, end="done")


@pytest.mark.deep
def test_redis_does_not_answer_for_too_long(tmp_path: Path) -> None:
    with _team(tmp_path, size=1) as (servers, redis):
        (server,) = servers.servers
        path, followers = _begin(servers, server)
        redis.stop()
        until(lambda: (tmp_path / "stopped").exists())  # the server has given up
        redis.resume()
        _check(followers, end="error")
        assert server.http.get(path).json()["error"]["code"] == "journal_unavailable"


@pytest.mark.deep
def test_models_and_apps_share_a_redis(tmp_path: Path) -> None:
    """Even where a model and an app have the same name, neither sees the other's streams or takes them over. The
    streams of a dead app's server are ended by a server of any app."""
    write(tmp_path, "counting.py", _APP)
    with own_redis(tmp_path / "redis") as (url, _):
        flags = ("--journal", url, "--lease-s", str(LEASE_S))

        def models(number: int) -> Server:
            return Server(PACED, *flags, "--data-dir", str(tmp_path / f"models-{number}"))

        def apps(number: int, *more: str) -> AppServer:
            return AppServer(
                "counting:app", *flags, "--data-dir", str(tmp_path / f"apps-{number}"), *more, directory=tmp_path
            )

        with (
            closing(models(1)) as model, closing(apps(1, "--name", "scripted")) as app,
            closing(models(2)) as next_model, closing(apps(2)) as next_app,
        ):  # fmt: skip
            for server in (model, app, next_model, next_app):
                server.wait_ready()
            of_model = model.create({"prompt": "Apart.", "max_tokens": 2_000})
            with app.http.stream("GET", "/", params={"to": _ENDLESS}) as answer:
                of_app = answer.headers["x-stream-id"]
            for server, stream_id in ((model, of_app), (app, of_model)):
                assert server.http.get(f"/v1/streams/{stream_id}").status_code == 404
                assert server.http.get(f"/v1/streams/{stream_id}/events").status_code == 404
            for server in (model, app):
                server.send_signal(signal.SIGKILL)
                server.wait()
            state = next_app.wait_state(of_app, "interrupted")
            assert state["app"] == "scripted"
            assert next_model.wait_state(of_model, "done")["continuity"] == "replayed"
            assert next_app.http.get(f"/v1/streams/{of_model}").status_code == 404
            assert "other models" not in next_model.log + next_app.log
