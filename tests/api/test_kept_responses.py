"""Stored responses are kept longer than their streams, and survive the server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI
from tests.api.own_keys import key_of
from tests.api.process import Server
from tests.clients.json_socket import open_socket, receive_json, send_json
from tests.waiting import until

_COUNT = 5
_BRIEF = ("--retention-s", "0.2")  # of streams


@contextlib.contextmanager
def _serving(directory: Path, *flags: str, has_database: bool = True) -> Iterator[tuple[Server, OpenAI]]:
    """With a database that somebody has made."""
    database = f"sqlite:///{directory / 'records.sqlite'}"
    server = Server("scripted", "--data-dir", str(directory / "data"), "--database", database, *_BRIEF, *flags)
    with contextlib.closing(server):
        server.wait_ready()
        if has_database:
            assert server.http.get("/v1/conversations").status_code == 200
        with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
            yield server, client


def _wait_expired(http: httpx.Client) -> None:
    """Until the log store has forgotten all streams."""
    until(lambda: "\ntailrace_streams 0.0\n" in http.get("/metrics").text)


def test_a_response_outlives_its_stream_and_the_server(tmp_path: Path) -> None:
    with _serving(tmp_path) as (server, client):
        first = client.responses.create(model="scripted", input="Hi", max_output_tokens=_COUNT, metadata={"a": "b"})
        events = server.http.get(f"/v1/responses/{first.id}?stream=true")
        _wait_expired(server.http)
        assert client.responses.retrieve(first.id) == first
        later = server.http.get(f"/v1/responses/{first.id}?stream=true")
        assert later.content == events.content
        assert later.headers["content-type"] == events.headers["content-type"]
        assert (
            server.http.post(f"/v1/responses/{first.id}/cancel").status_code == 200
        )  # it has ended, which is no error
    with _serving(tmp_path) as (server, client):
        assert client.responses.retrieve(first.id) == first
        second = client.responses.create(
            model="scripted", input="More", previous_response_id=first.id, max_output_tokens=_COUNT
        )
        assert second.usage is not None
        assert first.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens + _COUNT
        client.responses.delete(first.id)
        with pytest.raises(openai.APIStatusError) as gone:
            client.responses.retrieve(first.id)
        assert gone.value.status_code in (404, 410)
        _wait_expired(server.http)
        client.responses.delete(second.id)
        assert server.http.get(f"/v1/responses/{second.id}").status_code in (404, 410)


def test_every_door_has_the_stream_of_a_stored_response(tmp_path: Path) -> None:
    with _serving(tmp_path) as (server, client):
        stream_id = client.responses.create(model="scripted", input="Hi", max_output_tokens=_COUNT).id.removeprefix(
            "resp_"
        )
        _wait_expired(server.http)
        events = server.http.get(f"/v1/streams/{stream_id}/events").text
        sent = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
        assert sent[-1]["status"] == "done"
        assert server.http.get(f"/v1/durable/streams/{stream_id}").json() == sent
        with open_socket(server) as socket:
            send_json(socket, type="follow", stream_id=stream_id)
            assert receive_json(socket)["type"] == "following"
            frames = [receive_json(socket) for _ in sent]
            assert all(frame.items() >= event.items() for frame, event in zip(frames, sent, strict=True))
            last_seq = frames[-1]["seq"]
            send_json(socket, type="follow", stream_id=stream_id, after=last_seq)
            assert receive_json(socket)["type"] == "ended"
            send_json(socket, type="cancel", stream_id=stream_id)
            assert receive_json(socket)["status"] == "done"
        at_end = {"last-event-id": f"{stream_id}-{last_seq}"}
        assert server.http.get(f"/v1/streams/{stream_id}/events", headers=at_end).status_code == 204


def test_a_response_that_is_not_stored_expires_with_its_stream(tmp_path: Path) -> None:
    with _serving(tmp_path) as (server, client):
        response = client.responses.create(model="scripted", input="Hi", max_output_tokens=_COUNT, store=False)
        _wait_expired(server.http)
        assert server.http.get(f"/v1/responses/{response.id}").status_code == 410
        stream_id = server.create({"prompt": "Hi", "max_tokens": 2})
        _wait_expired(server.http)
        assert server.http.get(f"/v1/streams/{stream_id}").status_code == 410


@pytest.mark.parametrize("why", ["sealed", "absent"])
def test_without_a_database(tmp_path: Path, why: str) -> None:
    """Nothing is written open that the journal seals; and nobody's first response makes a database."""
    flags: tuple[str, ...] = ()
    if why == "sealed":
        (tmp_path / "key").write_text("k" * 40)
        flags = ("--journal-key-file", str(tmp_path / "key"))
    with _serving(tmp_path, *flags, has_database=why == "sealed") as (server, client):
        assert server.http.get("/v1/usage").json()["data"] == []
        response = client.responses.create(model="scripted", input="kanarienvogel", max_output_tokens=_COUNT)
        _wait_expired(server.http)
        assert server.http.get(f"/v1/responses/{response.id}").status_code == 410
    assert (tmp_path / "records.sqlite").exists() is (why == "sealed")
    for path in tmp_path.glob("records.sqlite*"):
        assert b"kanarienvogel" not in path.read_bytes()


def test_others_do_not_see_it(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'records.sqlite'}"
    me, you = key_of(database, "me"), key_of(database, "you")
    server = Server(
        "scripted", "--data-dir", str(tmp_path / "data"), "--database", database, "--public-metrics", *_BRIEF
    )
    with contextlib.closing(server):
        server.wait_ready()
        mine, yours = (
            httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {token}"}, timeout=60)
            for token in (me, you)
        )
        with mine, yours:
            made = mine.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 2}).json()["id"]
            _wait_expired(mine)
            assert mine.get(f"/v1/responses/{made}").status_code == 200
            assert yours.get(f"/v1/responses/{made}").status_code == 404
            assert yours.delete(f"/v1/responses/{made}").status_code == 404
            asked = {"input": "Hi", "previous_response_id": made}
            unknown = yours.post("/v1/responses", json=asked)
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "previous_response_not_found")
            assert mine.get(f"/v1/responses/{made}").status_code == 200
