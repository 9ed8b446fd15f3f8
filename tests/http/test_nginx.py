"""The recipe of docs/edge.md in a real nginx: TLS, a password, and an unusual port."""

from __future__ import annotations

import base64
import json
import re
import ssl
from collections.abc import Iterator
from contextlib import closing
from socket import create_connection

import httpx
import pytest
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.http.nginx import PASSWORD, secured
from tests.waiting import LONG_S
from websockets.sync.client import connect
from websockets.typing import Origin

pytestmark = pytest.mark.deep

ANSWER = Answer("Tell me of rivers.", 300, seed=3)
BODY = {"prompt": ANSWER.prompt, "max_tokens": ANSWER.count, "seed": ANSWER.seed}


@pytest.fixture(scope="module")
def behind() -> Iterator[Server]:
    with closing(Server("scripted:tokens_per_s=100", "--allowed-hosts", "chat.example")) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def port(behind: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with secured(tmp_path_factory.mktemp("nginx"), behind.port) as port:
        yield port


@pytest.fixture
def client(port: int) -> Iterator[httpx.Client]:
    """A client with the headers of a browser that shows https://chat.example:PORT/."""
    name = f"chat.example:{port}"
    headers = {"host": name, "origin": f"https://{name}"}
    with httpx.Client(
        base_url=f"https://127.0.0.1:{port}",
        headers=headers,
        auth=PASSWORD,
        verify=False,
        trust_env=False,
        timeout=LONG_S,
    ) as client:
        yield client


def test_the_password_is_needed(port: int, client: httpx.Client) -> None:
    assert client.get("/v1/models", auth=("river", "wrong")).status_code == 401
    assert client.get("/v1/models").json()["data"][0]["id"] == "scripted"


def test_the_page_and_all_that_it_loads(client: httpx.Client) -> None:
    page = client.get("/", headers={"accept": "text/html"})
    assert page.status_code == 200
    assert "<!doctype html>" in page.text.lower()
    names = re.findall(r'(?:src|href)="page/([^"]+)"', page.text)
    assert {"main.js", "page.css", "icon.svg", "lib/preact.js"} <= set(names)
    for name in names:
        assert client.get(f"/page/{name}").status_code == 200


def test_a_stream_is_not_buffered_and_resumes(behind: Server, client: httpx.Client) -> None:
    created = client.post("/v1/streams", json=BODY)
    assert created.status_code == 201, created.text
    stream_id = created.json()["id"]
    events = f"/v1/streams/{stream_id}/events"
    received = b""
    with client.stream("GET", events) as answer:
        for piece in answer.iter_raw():
            received += piece
            if received.count(b"\n\n") >= 5:
                assert behind.state(stream_id)["status"] == "running"  # nginx did not wait for the end
                break
    whole = received[: received.rindex(b"\n\n") + 2]
    num_seen = whole.count(b"\n\n")
    rest = client.get(events, headers={"last-event-id": f"{stream_id}-{num_seen}"})
    assert whole + rest.content == b"".join(ANSWER.native(stream_id))


def test_a_websocket(port: int) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    name = f"chat.example:{port}"
    secret = base64.b64encode(":".join(PASSWORD).encode()).decode()
    with connect(
        f"wss://{name}/v1/ws", ssl=context, sock=create_connection(("127.0.0.1", port)),
        origin=Origin(f"https://{name}"), additional_headers={"Authorization": f"Basic {secret}"}, proxy=None,
    ) as socket:  # fmt: skip
        socket.send(json.dumps({"type": "create", "id": "a", **BODY, "max_tokens": 5}))
        texts = []
        while (frame := json.loads(socket.recv(LONG_S))).get("type") != "done":
            texts.append(frame.get("text", ""))
    assert "".join(texts)
