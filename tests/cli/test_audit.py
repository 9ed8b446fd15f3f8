"""`--audit-log` with real servers."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from tests.api.process import Server
from tests.apps.process import AppServer, write
from tests.waiting import until
from websockets.sync.client import connect

from tailrace.cli import main

Lines = list[dict[str, Any]]  # Any: what JSON can be
_ENDLESS = {"prompt": "A prompt that nobody else may see.", "max_tokens": 60_000}


def _key(tmp_path: Path, *arguments: str) -> str:
    flags = ["--database", f"sqlite:///{tmp_path / 'records.sqlite'}", "--audit-log", str(tmp_path / "audit.jsonl")]
    made = CliRunner().invoke(main, ["keys", *arguments, *flags])
    assert made.exit_code == 0, made.stderr
    return made.stdout.strip()


def _lines(tmp_path: Path) -> Lines:
    return [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]


def _found(lines: Lines, event: str, **fields: object) -> Lines:
    return [line for line in lines if line["event"] == event and fields.items() <= line.items()]


def test_actions_on_keys_and_streams(tmp_path: Path) -> None:
    alice = _key(tmp_path, "create", "alice", "--scope", "generate", "--scope", "read", "--scope", "admin")
    bob = _key(tmp_path, "create", "bob")
    old = bob
    bob = _key(tmp_path, "rotate", old, "--grace", "0s")
    ids = {name: token.split("_")[1] for name, token in (("alice", alice), ("bob", bob))}
    server = Server(
        "scripted:tokens_per_s=50", "--database", f"sqlite:///{tmp_path / 'records.sqlite'}", "--audit-log",
        str(tmp_path / "audit.jsonl"),
    ).wait_ready()  # fmt: skip
    mine, theirs = {"x_api_key": alice}, {"x_api_key": bob}
    stream_id = server.create(_ENDLESS, **mine)
    assert server.post("/v1/tickets", {"stream_id": stream_id}, **mine).status_code == 201
    assert server.post(f"/v1/streams/{stream_id}/cancel", {}, **theirs).status_code == 404
    assert server.post(f"/v1/streams/{stream_id}/cancel", {}, **mine).status_code == 200
    assert server.http.delete(f"/v1/streams/{stream_id}", headers={"x-api-key": alice}).status_code == 204
    assert server.post("/v1/admin/keys", {"owner": "carol"}, **theirs).status_code == 403
    made = server.post("/v1/admin/keys", {"owner": "carol"}, **mine).json()
    assert server.post(f"/v1/admin/keys/{made['id']}/rotate", {}, **mine).status_code == 200
    assert server.http.delete(f"/v1/admin/keys/{made['id']}", headers={"x-api-key": alice}).status_code == 200
    assert server.post("/v1/streams", _ENDLESS, x_api_key=old).status_code == 401
    with connect(f"{server.url.replace('http', 'ws')}/v1/ws", additional_headers={"x-api-key": alice}) as socket:
        socket.send(json.dumps({"type": "create", "id": "a", **_ENDLESS}))
        on_socket = json.loads(socket.recv(timeout=30))["stream_id"]
        socket.send(json.dumps({"type": "cancel", "id": "a"}))
        until(lambda: bool(_found(_lines(tmp_path), "stream.cancel", stream=on_socket)))
    _key(tmp_path, "revoke", ids["bob"])
    lines = _lines(tmp_path)
    done = {"outcome": "done"}
    by_alice = done | {"owner": "alice", "key": ids["alice"], "client": "127.0.0.1"}
    for event, fields in (
        ("key.create", done | {"of_owner": "alice", "of_key": ids["alice"]}),
        ("key.rotate", done | {"of_owner": "bob", "of_key": ids["bob"]}),
        ("key.revoke", done | {"of_owner": "bob", "of_key": ids["bob"]}),
        ("key.create", by_alice | {"of_owner": "carol", "of_key": made["id"]}),
        ("key.rotate", by_alice | {"of_key": made["id"]}),
        ("key.revoke", by_alice | {"of_key": made["id"]}),
        ("ticket.give", by_alice | {"stream": stream_id}),
        ("stream.cancel", by_alice | {"stream": stream_id}),
        ("stream.cancel", {"owner": "bob", "outcome": "unknown_stream", "stream": stream_id}),
        ("stream.delete", by_alice | {"stream": stream_id}),
        ("stream.cancel", by_alice | {"stream": on_socket}),
        ("authorize", {"owner": "bob", "key": ids["bob"], "outcome": "forbidden"}),
        ("authenticate", {"outcome": "invalid_api_key", "client": "127.0.0.1"}),
    ):
        assert len(_found(lines, event, **fields)) == 1, (event, fields)
    begun = {"owner": "alice", "key": ids["alice"], "model": "scripted"} | done
    assert _found(lines, "stream.begin", **begun, wire="native", stream=stream_id)
    assert _found(lines, "stream.begin", **begun, wire="websocket", stream=on_socket)
    text = (tmp_path / "audit.jsonl").read_text()
    for secret in (alice, bob, old, made["token"]):
        assert secret.split("_", 2)[2] not in text
    assert "nobody else" not in text
    server.close()


def test_sighup_reopens_the_file_and_interrupts_no_stream(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    server = Server("scripted:tokens_per_s=50", "--audit-log", str(path)).wait_ready()
    stream_id = server.create(_ENDLESS)
    path.rename(tmp_path / "audit.1")
    server.send_signal(signal.SIGHUP)
    until(path.exists)
    assert server.state(stream_id)["status"] == "running"
    server.http.delete(f"/v1/streams/{stream_id}")
    assert [line["event"] for line in _lines(tmp_path)] == ["stream.delete"]
    server.close()


def test_sighup_ends_no_server_that_has_no_file_to_open(tmp_path: Path) -> None:
    """Without a terminal; `start` makes a session of its own. With one, SIGHUP says that it is gone."""
    server = Server("scripted").wait_ready()
    server.send_signal(signal.SIGHUP)
    assert server.state(server.create({"prompt": "a", "max_tokens": 1}))["status"] in ("queued", "running", "done")
    server.close()


@pytest.mark.parametrize("verb", ["serve", "keys"])
def test_a_file_that_cannot_be_opened(verb: str, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "audit.jsonl"
    database = ["--database", f"sqlite:///{tmp_path / 'records.sqlite'}"]
    if verb == "keys":
        result = CliRunner().invoke(main, ["keys", "create", "alice", *database, "--audit-log", str(path)])
        assert result.exit_code == 1
        assert "cannot be written" in result.stderr
        assert CliRunner().invoke(main, ["keys", "list", *database]).stderr == "There are no keys.\n"
        return
    server = Server("scripted", "--audit-log", str(path), *database)
    assert server.wait() == 1
    message = f"tailrace: The audit log {path} cannot be written: No such file or directory."
    assert server.log.splitlines()[-1] == message
    server.close()


def test_streams_of_apps(tmp_path: Path) -> None:
    write(
        tmp_path,
        "bot.py",
        """
        from fastapi import FastAPI
        from tailrace import serve

        web = FastAPI()

        @serve.deployment
        @serve.ingress(web)
        class Bot:
            @web.get("/")
            async def say(self):
                async def words():
                    while True:
                        yield "word "
                return serve.stream(words())

        app = Bot.bind()
        """,
    )
    running = AppServer("bot:app", "--audit-log", str(tmp_path / "audit.jsonl"), directory=tmp_path).wait_ready()
    with httpx.stream("GET", running.url, timeout=30) as answer:
        stream_id = answer.headers["x-stream-id"]
        assert httpx.delete(f"{running.url}/v1/streams/{stream_id}").status_code == 204
    assert [(line["event"], line["stream"]) for line in _lines(tmp_path)] == [
        ("stream.begin", stream_id), ("stream.delete", stream_id),
    ]  # fmt: skip
    running.close()
