"""Stream ids: which requests the front answers, and which the apps answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from httpx_sse import connect_sse
from tests.apps.process import AppServer, write
from tests.http.turns import Turns
from tests.testing.redis_server import prefix_of, shared_url
from tests.waiting import LONG_S
from websockets.sync.client import connect

_APP = """
import asyncio
from fastapi import FastAPI, Request, WebSocket
from tailrace import serve


def made(name):
    web = FastAPI()

    @serve.deployment(name=name)
    @serve.ingress(web)
    class Counting:
        @web.get("/count")
        @web.post("/count")
        async def count(self, to: int = 3):
            async def numbers():
                for number in range(to):
                    yield {name: number}
                    await asyncio.sleep(0.01)
            return serve.stream(numbers())

        @web.websocket("/")
        async def talk(self, ws: WebSocket):
            await ws.accept()
            await ws.send_text(f"{name} at {ws.url.path}")

        @web.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
        async def anything(self, path: str, request: Request):
            return {"app": name, "path": path, "cursor": request.headers.get("last-event-id")}

    return Counting.bind()


one, two = made("one"), made("two")
"""

_PLAN = """
applications:
  - {name: one, import_path: "counting:one"}
  - {name: two, route_prefix: /two, import_path: "counting:two"}
"""

UNKNOWN = "AAAAAAAAAAAAAAAAAAAAAA"


@pytest.fixture(scope="module", params=["one server", "two servers over one Redis"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[AppServer]]:
    directory = tmp_path_factory.mktemp("counting")
    write(directory, "counting.py", _APP)
    (directory / "apps.yaml").write_text(_PLAN)
    is_shared = request.param != "one server"
    flags = ["--journal", f"{shared_url()}?prefix={prefix_of(directory)}"] if is_shared else []
    size = 2 if is_shared else 1
    with contextlib.ExitStack() as running:
        started = [AppServer("apps.yaml", *flags, directory=directory) for _ in range(size)]
        for server in started:
            running.callback(server.close)
        yield [server.wait_ready() for server in started]


@pytest.fixture
def apps(servers: list[AppServer]) -> AppServer:
    return servers[0]


@pytest.fixture
def http(servers: list[AppServer]) -> Iterator[httpx.Client]:
    with httpx.Client(
        transport=Turns([server.port for server in servers]), base_url="http://127.0.0.1", timeout=LONG_S
    ) as client:
        yield client


def _count(http: httpx.Client, path: str = "/count") -> tuple[str, list[str]]:
    """Return the id of a stream, and the ids of its events."""
    with connect_sse(http, "POST", path) as events:
        return events.response.headers["x-stream-id"], [event.id for event in events.iter_sse()]


def _code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize("path", ["/count", "/two/count", "/anything"])
def test_an_unknown_id_starts_nothing(http: httpx.Client, path: str) -> None:
    for method in ("GET", "POST"):
        answer = http.request(method, path, headers={"last-event-id": f"{UNKNOWN}-3"})
        assert _code(answer) == (404, "unknown_stream")


@pytest.mark.parametrize("cursor", ["5", "42-7", "123e4567-e89b-12d3-a456-426614174000", f"{UNKNOWN}-x", UNKNOWN])
def test_ids_of_another_form_are_passed_to_the_app(http: httpx.Client, cursor: str) -> None:
    answer = http.get("/anything", headers={"last-event-id": cursor})
    assert (answer.status_code, answer.json()["cursor"]) == (200, cursor)


def test_paths_of_unknown_streams(http: httpx.Client) -> None:
    for method, verb in (("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("DELETE", ""), ("GET", "/frobnicate")):
        assert _code(http.request(method, f"/v1/streams/{UNKNOWN}{verb}")) == (404, "unknown_stream")
    for path in ("v1/streams/mine", "v1/streams/mine/events", "v1/streams"):
        assert http.get(f"/{path}").json()["path"] == path


def test_a_deleted_stream_is_gone_for_the_app(http: httpx.Client) -> None:
    stream_id, ids = _count(http)
    assert http.delete(f"/v1/streams/{stream_id}").status_code == 204
    assert _code(http.get(f"/v1/streams/{stream_id}/events")) == (410, "stream_expired")
    assert _code(http.get("/count", headers={"last-event-id": ids[0]})) == (410, "stream_expired")


def test_a_route_resumes_streams_of_its_own_app(http: httpx.Client) -> None:
    """Another app's route does not find them. /v1/streams finds the streams of all apps, because the id is the only
    secret."""
    stream_id, ids = _count(http, "/two/count")
    assert f"id: {ids[1]}" in http.post("/two/count", headers={"last-event-id": ids[0]}).text
    assert f"id: {ids[1]}" in http.get("/two/anything", headers={"last-event-id": ids[0]}).text
    assert _code(http.post("/count", headers={"last-event-id": ids[0]})) == (404, "unknown_stream")
    assert http.get(f"/v1/streams/{stream_id}").json()["app"] == "two"


def test_the_position_may_be_in_the_url(http: httpx.Client) -> None:
    """As on the built-in server, the parameter is `after`, and unknown parameters are named."""
    stream_id, ids = _count(http)
    events = f"/v1/streams/{stream_id}/events"
    for after in ("2", ids[1]):
        assert http.get(events, params={"after": after}).text.startswith('data: {"one":2}')
    ignored = http.get(events, params={"last_event_id": ids[1]})
    assert ignored.headers["x-tailrace-ignored"] == "last_event_id"
    assert ignored.text.startswith("retry:")
    assert "x-tailrace-ignored" not in http.get(events).headers


def test_the_ends_of_streams(http: httpx.Client) -> None:
    """This is what the page says of the routes below /v1/streams."""
    stream_id, ids = _count(http)
    assert http.get("/count", headers={"last-event-id": ids[-1]}).status_code == 204
    assert http.post(f"/v1/streams/{stream_id}/cancel").json()["status"] == "done"
    with connect_sse(http, "GET", "/count", params={"to": 1_000_000}) as events:
        running = events.response.headers["x-stream-id"]
        shown = events.iter_sse()
        next(shown)
        assert http.delete(f"/v1/streams/{running}").status_code == 204
        *_, last = shown
    assert (last.event, json.loads(last.data)) == ("cancelled", {"status": "cancelled"})


def test_a_prefix_needs_no_slash(apps: AppServer) -> None:
    """HTTP is redirected to the path with a slash; a WebSocket is accepted at once."""
    assert apps.http.get("/two", follow_redirects=True).json()["app"] == "two"
    for path in ("/two", "/two/"):
        with connect(apps.url.replace("http", "ws") + path) as ws:
            assert ws.recv(timeout=LONG_S) == "two at /two/"


def test_counters_have_the_type_counter(apps: AppServer) -> None:
    _count(apps.http, "/two/count")
    lines = apps.http.get("/-/metrics").text.splitlines()
    for kind in ("requests", "restarts", "streams"):
        assert f"# TYPE tailrace_app_{kind}_total counter" in lines
    counted = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(counted['tailrace_app_streams_total{app="two",status="done"}']) >= 1
    assert float(counted['tailrace_app_requests_total{app="two",status="200"}']) >= 1
    assert counted['tailrace_app_restarts_total{app="two",deployment="two"}'] == "0.0"


@pytest.mark.deep
def test_another_app_on_the_port_does_not_continue_old_streams(
    tmp_path: Path, run: Callable[..., AppServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path / "home"))
    write(tmp_path, "counting.py", _APP)
    first = run("counting:one").wait_ready()
    port = ["--port", str(first.port)]
    first.close()
    kept: dict[str, str] = {}
    for target in ("counting:one", "counting:two", "counting.py:one"):
        server = run(target, *port).wait_ready()
        if not kept:
            kept["id"], _ = _count(server.http)
        expected = 404 if target == "counting:two" else 200
        assert server.http.get(f"/v1/streams/{kept['id']}").status_code == expected
        server.close()
