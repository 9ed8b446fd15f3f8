"""Streams of apps on Ray with a Redis: resumed at any replica, and what happens to them when replicas die or stop."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from httpx_sse import connect_sse
from tests.apps.on_ray.cluster import LEASE_S, START_S, RayHouse, RayRun, processes
from tests.apps.process import AppServer, write
from tests.faults.house import Follower
from tests.faults.laws import status_of
from tests.http.wire import as_json, sse_data
from tests.testing.redis_server import own_redis
from tests.waiting import until

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

_APP = """
import asyncio, os, time
from starlette.requests import Request
from tailrace import serve

HERE = os.path.dirname(os.path.abspath(__file__))


def note(name):
    with open(os.path.join(HERE, name), "a") as file:
        file.write(".")


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Child:
    async def numbers(self, to):
        try:
            for number in range(to):
                yield {"number": number}
                await asyncio.sleep(0.02)
        finally:
            note("child-ended")

    async def wait(self):
        note("child-waits")
        try:
            await asyncio.sleep(500)
        finally:
            note("child-left")


@serve.deployment(
    num_replicas=2, max_ongoing_requests=50, graceful_shutdown_timeout_s=10, ray_actor_options={"num_cpus": 0.1}
)
class Counting:
    def __init__(self, child):
        self.child = child

    async def numbers(self, to, how):
        for number in range(to):
            yield {"number": number, "pid": os.getpid()}
            if how == "blocks" and number == 3:
                time.sleep(LEASE_S * 2)
            while how == "waits" and number == 3 and not os.path.exists(os.path.join(HERE, "go")):
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.02)

    async def __call__(self, request: Request):
        query = request.query_params
        if "plain" in query:
            return "plain"
        if "waits" in query:
            return await self.child.wait.remote()
        to = int(query["to"])
        if "child" in query:
            return serve.stream(self.child.options(stream=True).numbers.remote(to))
        if "fails" in query:
            return serve.stream(self.failing())
        return serve.stream(self.numbers(to, query.get("how")), headers={"x-own": "kept"})

    async def failing(self):
        yield {"number": 0}
        raise ValueError("secret")


app = Counting.bind(Child.bind())
""".replace("LEASE_S", str(LEASE_S))

_ENDLESS = 1_000_000
_REPLICA = "ray::ServeReplica:default:Counting"


@contextlib.contextmanager
def _house(directory: Path) -> Iterator[RayHouse]:
    write(directory, "counting.py", _APP)
    with own_redis(directory / "redis") as (url, _):
        flags = ("--journal", url, "--lease-s", str(LEASE_S))
        server = RayRun("counting:app", *flags, directory=directory)
        house = RayHouse(server, journal=url)
        try:
            server.wait_ready(timeout_s=START_S)
            yield house
        finally:
            house.is_open = False
            server.close()


def _begin(http: httpx.Client, **query: object) -> tuple[str, str]:
    """Begin a stream and leave. Returns its id, and its first event."""
    with http.stream("GET", "/", params={"to": _ENDLESS, **query}) as answer:  # type: ignore[dict-item]  # numbers, text
        return answer.headers["x-stream-id"], next(answer.iter_lines())


def test_the_life_of_streams(tmp_path: Path) -> None:
    with _house(tmp_path) as house:
        server = house.server
        http = server.http
        assert http.get("/", params={"plain": 1}).text == "plain"
        with connect_sse(http, "GET", "/", params={"to": 20}) as events:
            assert events.response.headers["x-own"] == "kept"
            path = events.response.headers["content-location"]
            whole = [(event.id, event.event, event.data) for event in events.iter_sse()]
        stream_id = path.rpartition("/")[2]
        assert [event_id for event_id, _, _ in whole] == [f"{stream_id}-{number}" for number in range(1, 22)]
        assert whole[-1][1] == "done"
        # At any replica, by the app's own path, or by that of streams.
        for _ in range(4):
            for where in ("/", f"{path}/events"):
                with connect_sse(http, "GET", where, headers={"last-event-id": f"{stream_id}-7"}) as events:
                    assert [(event.id, event.event, event.data) for event in events.iter_sse()] == whole[7:]
        assert len(http.get(path).json()["items"]) == 20
        assert http.get("/", headers={"last-event-id": f"{stream_id}-21"}).status_code == 204
        unknown = http.get("/", headers={"last-event-id": f"{'A' * 22}-3"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_stream")
        assert http.get("/v1/streams/mine").status_code == 404

        running, _ = _begin(http)
        follower = Follower(house, running)
        follower.wait_events(5)
        assert http.post(f"/v1/streams/{running}/cancel").json()["status"] == "cancelled"
        follower.wait()
        assert status_of(follower.events[-1]) == "cancelled"
        assert http.delete(f"/v1/streams/{running}").status_code == 204
        assert {http.get(f"/v1/streams/{running}").status_code for _ in range(6)} == {410}

        failed, _ = _begin(http, fails=1)
        state = server.wait_state(failed, "error")
        assert state["error"]["code"] == "app_failed"
        assert "secret" not in str(state)

        # The calls of a stream go on when its reader has left, and end with the stream.
        called, _ = _begin(http, child=1, to=100)
        assert len(server.wait_state(called, "done")["items"]) == 100
        (tmp_path / "child-ended").unlink()
        called, _ = _begin(http, child=1)
        assert http.post(f"/v1/streams/{called}/cancel").status_code == 200
        until((tmp_path / "child-ended").exists)
        # A plain request that is left is cancelled with its calls, as without a journal.
        with contextlib.suppress(httpx.TimeoutException), httpx.Client(base_url=server.url, trust_env=False) as client:
            client.get("/", params={"waits": 1}, timeout=2.0)
        assert (tmp_path / "child-waits").exists()
        until((tmp_path / "child-left").exists)

        # Code that blocks its event loop for longer than the lease loses nothing.
        blocking, _ = _begin(http, to=20, how="blocks")
        assert len(server.wait_state(blocking, "done")["items"]) == 20


def test_a_replica_is_killed(tmp_path: Path) -> None:
    with _house(tmp_path) as house:
        of_pid: dict[int, list[Follower]] = {}
        while len(of_pid) < 2 or sum(map(len, of_pid.values())) < 6:
            stream_id, _ = _begin(house.server.http, to=500)
            follower = Follower(house, stream_id)
            follower.wait_events(3)
            pid = as_json(sse_data(follower.events[0])[0])["pid"]
            of_pid.setdefault(pid, []).append(follower)
        killed, _ = of_pid
        os.kill(killed, signal.SIGKILL)
        for pid, followers in of_pid.items():
            for follower in followers:
                follower.wait()
                *items, last = follower.events
                assert [as_json(sse_data(item)[0])["number"] for item in items] == list(range(len(items)))
                assert status_of(last) == ("interrupted" if pid == killed else "done")
                assert (len(items) == 500) == (pid != killed)
        replicas = processes("ray::ServeReplica:tailrace-streams", house.server.process.pid)
        stream_id, _ = _begin(house.server.http, to=300)
        follower = Follower(house, stream_id)
        follower.wait_events(3)
        replicas[0].kill()  # readers find the other one
        follower.wait()
        assert status_of(follower.events[-1]) == "done"
        until(lambda: len(processes(_REPLICA, house.server.process.pid)) == 2)


def test_replicas_are_stopped(tmp_path: Path) -> None:
    """A stream that ends while its replica stops is not cut, even without a reader; another one ends as interrupted.
    Servers of `tailrace run` and replicas on Ray share their streams."""
    with _house(tmp_path) as house:
        plain = AppServer("counting:app", "--journal", house.journal, "--lease-s", str(LEASE_S), directory=tmp_path)
        with contextlib.closing(plain) as here:
            here.wait_ready()
            ending, _ = _begin(house.server.http, to=20, how="waits")
            endless, _ = _begin(house.server.http)
            assert {here.state(one)["status"] for one in (ending, endless)} == {"running"}
            house.server.send_signal(signal.SIGTERM)
            house.server.wait_line("^Stopping")
            (tmp_path / "go").touch()
            assert len(here.wait_state(ending, "done", timeout_s=60)["items"]) == 20
            here.wait_state(endless, "interrupted", timeout_s=60)
