"""Servers that share a Redis: a page finds the answer of its chat at any of them, also after the death of the server
that made it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.faults.team import team
from tests.plugins.front_ends.test_front_ends_killed import BODIES, COUNT, FOLLOW, QUESTION, SEED, text_of

_JOIN = "/v1/ag-ui?runId=run-1&offset=-1"


def _begin(server: Server, path: str) -> str:
    """Begin an answer, and leave it after its first event. Return the id of its last event, if it has one."""
    with server.http.stream("POST", path, json=BODIES[path], headers={"x-run-id": "run-1"}) as begun:
        assert begun.status_code == 200
        first = next(begun.iter_bytes()).decode()
    ids = [line.removeprefix("id: ") for line in first.splitlines() if line.startswith("id: ")]
    return ids[-1] if ids else ""


def _nobody_else_finds_it(server: Server) -> None:
    for path in ("/v1/ai-sdk/chat/chat%2F2/stream", "/v1/ag-ui/chat/events", "/v1/ag-ui/chat%2F1%20/events"):
        assert server.http.get(path).status_code == 204


each = pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.deep if path == "/v1/ag-ui" else ()) for path in sorted(BODIES)]
)


@each
def test_any_server_finds_the_answer_of_a_chat(path: str, tmp_path: Path) -> None:
    answer = Answer(chat_ids(QUESTION), COUNT, SEED)
    with team(tmp_path) as (servers, _):
        one, other = servers.servers
        _begin(one, path)
        _nobody_else_finds_it(other)
        assert text_of(other.http.get(FOLLOW[path]).content) == answer.text
        assert [server.http.get(FOLLOW[path]).status_code for server in (one, other)] == [204, 204]
        assert other.http.delete(FOLLOW[path]).status_code == 404


@each
def test_another_server_goes_on_after_the_death_of_the_first(path: str, tmp_path: Path) -> None:
    answer = Answer(chat_ids(QUESTION), COUNT, SEED)
    with team(tmp_path) as (servers, _):
        one, other = servers.servers
        last = _begin(one, path)
        servers.kill(one)
        assert text_of(other.http.get(FOLLOW[path]).content) == answer.text
        if path == "/v1/ag-ui":
            _comes_back(other, answer, last)


def _comes_back(server: Server, answer: Answer, last: str) -> None:
    """As TanStack AI's client does: by the id of the run, and with the id of the last event."""
    assert text_of(server.http.get(_JOIN).content) == answer.text
    again = server.http.post("/v1/ag-ui", json=BODIES["/v1/ag-ui"], headers={"last-event-id": last})
    assert text_of(again.content) == answer.text
    assert f"id: {last}\n".encode() in again.content
    other_run = BODIES["/v1/ag-ui"] | {"runId": "run-2"}
    assert server.http.post("/v1/ag-ui", json=other_run, headers={"last-event-id": last}).status_code == 404
    assert server.http.get("/v1/ag-ui?runId=run-2").status_code == 404


@each
def test_any_server_stops_the_answer_of_a_chat(path: str, tmp_path: Path) -> None:
    with team(tmp_path) as (servers, _):
        one, other = servers.servers
        with one.http.stream("POST", path, json=BODIES[path]) as begun:
            chunks = begun.iter_bytes()
            next(chunks)
            assert other.http.delete(FOLLOW[path]).status_code == 200
            rest = b"".join(chunks)
        assert b'"type":"abort"' in rest or b'"outcome":{"type":"cancelled"}' in rest
