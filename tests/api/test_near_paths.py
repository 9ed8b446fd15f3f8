"""Base URLs that are nearly right, on a whole server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from tests.api.keyed import serving_with_keys
from tests.api.process import Server
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tailrace.http.near_paths import NearPaths
from tailrace.http.wires import ServedWires

_CHAT = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server("scripted:tokens_per_s=1000", "--access-log").wait_ready()
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    # The whole URL is given to each request: what follows two slashes would be a host.
    with httpx.Client(trust_env=False, timeout=60) as made:
        yield made


@pytest.mark.parametrize(
    "path",
    [
        "/chat/completions", "/v1/chat/completions/", "/v1//chat/completions", "/v1/v1/chat/completions",
        "//v1/chat/completions", "/v1/v1//chat/completions//",
    ],
)  # fmt: skip
def test_a_chat(server: Server, client: httpx.Client, path: str) -> None:
    assert client.post(server.url + path, json=_CHAT).json()["object"] == "chat.completion"
    refused = client.get(server.url + path)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    "path",
    ["/models", "/v1/models/", "/v1/v1/models", "/api/tags/", "/v1/api/tags", "/livez/", "/models/scripted"],
)
def test_what_only_reads(server: Server, client: httpx.Client, path: str, method: str) -> None:
    assert client.request(method, server.url + path).status_code == 200


def test_a_stream_and_its_line_in_the_log(server: Server, client: httpx.Client) -> None:
    begun = client.post(f"{server.url}/streams/", json={"prompt": "Hi.", "max_tokens": 2}).json()["id"]
    assert "event: done" in client.get(f"{server.url}/v1//streams/{begun}/events/").text
    server.wait_line(rf" GET /v1/streams/{begun}/events 200 ")


@pytest.mark.parametrize("path", ["/responses", "/v1/v1/responses", "/v1//responses/"])
def test_a_websocket(server: Server, path: str) -> None:
    with connect(server.url.replace("http", "ws", 1) + path) as socket:
        socket.send("{}")
        assert json.loads(socket.recv())["type"] == "error"


@pytest.mark.parametrize("path", ["/ws", "/v1/ws/", "/v1/nothing", "//"])
def test_other_websockets_have_one_path(server: Server, path: str) -> None:
    with pytest.raises(InvalidStatus, match="404"), connect(server.url.replace("http", "ws", 1) + path):
        pass


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/competions", "/v1/chat/completions"),
        ("/api/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/streams/abc/event", "/v1/streams/{stream_id}/events"),
        ("/v1/conversations/abc/items/", "/v1/conversations/{conversation_id}/items"),
    ],
)
def test_a_wrong_path_gets_the_nearest_one(server: Server, client: httpx.Client, path: str, near: str) -> None:
    refused = client.get(server.url + path)
    assert refused.status_code == 404
    assert f"Did you mean {near}?" in refused.text


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/favicon.ico", "/" + "v1/" * 10_000, "/\N{SNOWMAN}<b>"])
def test_another_path_gets_none(server: Server, client: httpx.Client, path: str) -> None:
    refused = client.get(server.url + path)
    assert refused.status_code == 404
    assert "There is nothing at this path. /openapi.json lists all paths." in refused.text


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/speech", "/audio/translations"])
def test_audio_is_refused_by_name(server: Server, client: httpx.Client, path: str) -> None:
    form = {"content-type": "multipart/form-data; boundary=x"}
    refused = client.post(server.url + path, content=b"RIFF", headers=form)
    assert refused.status_code == 404
    assert "This server reads and makes no audio." in refused.text


def test_only_wires_have_a_second_path(server: Server, client: httpx.Client) -> None:
    """A proxy may forbid `/v1/admin`."""
    of_wires = {operation.path for wire in ServedWires().all for operation in wire.operations}
    own = {path for path in client.get(f"{server.url}/openapi.json").json()["paths"] if "{" not in path} - of_wires
    assert {"/metrics", "/v1/admin/keys", "/v1/session"} <= own
    for path in own - {"/", "/docs"}:
        for wrong in {f"{path}/", f"/{path}", f"/v1{path}", path.removeprefix("/v1")} - {path}:
            refused = client.get(server.url + wrong)
            assert refused.status_code == 404, wrong
            assert f"Did you mean {path}?" in refused.text, wrong


async def test_the_right_path_is_the_one_that_is_checked(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        token = house.key(scopes=("generate", "read", "wire:openai"))
        async with house.client() as nobody, house.client(token) as client:
            for path in ("/models", "/v1/v1/models", "/v1//streams/x/events"):
                assert (await nobody.get(path)).status_code == 401
            assert (await nobody.get("/livez/")).status_code == 200
            assert (await client.post("/chat/completions", json=_CHAT)).status_code == 200
            assert (await client.post("/messages", json={**_CHAT, "model": "default"})).status_code == 403
            assert (await client.post("/streams", json={"prompt": "Hi.", "max_tokens": 2})).status_code == 403


@pytest.mark.parametrize("path", ["/v1/durable/a//b/", "/v1/models/a//b", "/page/lib//preact.js", "/v1/nothing/"])
async def test_other_paths_stay_as_they_are(path: str) -> None:
    found: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(scope["path"])

    async def nothing(*_: object) -> None:
        raise AssertionError

    routes = [Route(one, nothing) for one in ("/v1/durable/{path:path}", "/page/{name:path}", "/v1/models/{name:path}")]
    scope = {"type": "http", "path": path, "raw_path": path.encode()}
    await NearPaths(app, ServedWires(), routes)(scope, nothing, nothing)  # type: ignore[arg-type]  # neither is called
    assert found == [path]
