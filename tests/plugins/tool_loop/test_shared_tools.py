"""Tools of MCP servers at servers that share a Redis: another one goes on, and no call is made twice."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from tests.api.process import Server
from tests.faults.team import Team, team
from tests.plugins.tool_loop.tool_servers import Json, Tools, asks_of, calls_of, client_of
from tests.waiting import until

pytest.importorskip("mcp")

NEVER: Json = {"type": "mcp", "server_label": "count", "require_approval": "never"}
ASK: Json = {"type": "mcp", "server_label": "count"}
_SLOW: Json = {"text": "a", "sleep_s": 3}


@contextlib.contextmanager
def _team(
    path: Path, turns: list[list[tuple[str, Json]]], *, size: int = 2, tokens_per_s: int = 0
) -> Iterator[tuple[Team[Server], Tools]]:
    tools = Tools(path, turns)
    tools.tokens_per_s = tokens_per_s
    flags = ("--mcp-servers", str(path / "mcp.json"), "--mcp-commands")
    with team(path, size=size, source=tools.source, flags=flags) as (servers, _):
        yield servers, tools


def _begin(server: Server, given: Any = "Go.", tool: Json = NEVER, **more: Any) -> Response:  # Any: what it takes
    tools: Any = [tool]
    with client_of(server) as client:
        response: Response = client.responses.create(model="scripted", input=given, tools=tools, **more)
        return response


def _ended(server: Server, response_id: str) -> Response:
    with client_of(server) as client:
        for _ in client.responses.retrieve(response_id, stream=True):
            pass
        return client.responses.retrieve(response_id)


def _approve(server: Server, asked: Response, **more: Any) -> Response:  # Any: as above
    (ask,) = asks_of(asked)
    answer = {"type": "mcp_approval_response", "approval_request_id": ask.id, "approve": True}
    return _begin(server, [answer], ASK, previous_response_id=asked.id, **more)


def test_another_server_goes_on_after_a_death_during_a_call(tmp_path: Path) -> None:
    """The call is not repeated unless the user says so, at yet another server."""
    with _team(tmp_path, [[("count__append", _SLOW)]]) as (servers, tools):
        first, second = servers.servers
        begun = _begin(first, background=True)
        tools.wait_counted(1)
        assert client_of(second).responses.retrieve(begun.id).status == "in_progress"
        servers.kill(first)
        response = _ended(second, begun.id)
        (call,) = calls_of(response)
        assert call.error is not None
        assert call.error.type == "mcp_protocol_error"
        assert call.error.code == -32000
        assert tools.counted() == ["append"]
        third = servers.add()
        done = _approve(third, response)
        assert [one.output for one in calls_of(done)] == ["a"]
        assert done.output_text == "The tool has answered."
        assert tools.counted() == ["append", "append"]
        again = _approve(second, response)  # sent twice, it makes no second call
        assert [one.output for one in calls_of(again)] == ["a"]
        assert tools.counted() == ["append", "append"]


@pytest.mark.deep
def test_a_tool_that_does_no_harm_is_called_again_by_another_server(tmp_path: Path) -> None:
    with _team(tmp_path, [[("count__look", _SLOW)]]) as (servers, tools):
        first, second = servers.servers
        begun = _begin(first, background=True)
        tools.wait_counted(1)
        servers.kill(first)
        response = _ended(second, begun.id)
        assert [one.output for one in calls_of(response)] == ["a"]
        assert response.output_text == "The tool has answered."
        assert tools.counted() == ["look", "look"]


def test_every_server_shows_and_stops_a_response(tmp_path: Path) -> None:
    turns: list[list[tuple[str, Json]]] = [
        [("count__append", {"text": "a"})],
        [("count__look", {"text": "b", "sleep_s": 1})],
    ]
    with _team(tmp_path, turns) as (servers, tools):
        first, second = servers.servers
        begun = _begin(first, background=True)
        with client_of(first) as near, client_of(second) as far:
            ours = list(near.responses.retrieve(begun.id, stream=True))
            theirs = list(far.responses.retrieve(begun.id, stream=True))
            assert theirs == ours
            assert far.responses.retrieve(begun.id) == near.responses.retrieve(begun.id)
            follow_up = _begin(second, "And?", previous_response_id=begun.id)
            assert follow_up.status == "completed"
            far.responses.delete(begun.id)
            for client in (near, far):
                with pytest.raises(Exception, match="There is no such response"):
                    client.responses.retrieve(begun.id)
        assert tools.counted()[:2] == ["append", "look"]


@pytest.mark.deep
def test_another_server_shows_a_turn_of_the_model_as_it_comes(tmp_path: Path) -> None:
    """The turn has many tokens, and is not kept yet when they come."""
    turns: list[list[tuple[str, Json]]] = [[("count__append", {"text": "long " * 100})]]
    with _team(tmp_path, turns, tokens_per_s=20) as (servers, tools):
        first, second = servers.servers
        begun = _begin(first, background=True)
        with client_of(second) as far:
            seen: list[Any] = []
            with far.responses.retrieve(begun.id, stream=True) as stream:
                for event in stream:
                    seen.append(event.to_dict())
                    if event.type == "response.mcp_call_arguments.delta":
                        break
            assert not tools.counted()
            servers.kill(first)  # the other one goes on with the turn that it has shown
            with far.responses.retrieve(begun.id, stream=True) as stream:
                again: list[Any] = [event.to_dict() for event in stream]
        assert again[: len(seen)] == seen
        assert again[-1]["response"]["status"] == "completed"
        assert tools.counted() == ["append"]


@pytest.mark.deep
def test_a_cancel_stops_the_turn_of_a_dead_server(tmp_path: Path) -> None:
    """Its stream goes on at the other server, which would write it to the end."""
    turns: list[list[tuple[str, Json]]] = [[("count__append", {"text": "long " * 2000})]]
    with _team(tmp_path, turns, tokens_per_s=5) as (servers, _):
        first, second = servers.servers
        begun = _begin(first, background=True)
        with client_of(second) as far:
            with far.responses.retrieve(begun.id, stream=True) as stream:
                for event in stream:
                    if event.type == "response.mcp_call_arguments.delta":
                        break
            servers.kill(first)
            cancelled = far.responses.cancel(begun.id)
            assert cancelled.status == "cancelled"
            assert far.responses.retrieve(begun.id) == cancelled
        until(lambda: not second.http.get("/v1/streams").json()["data"])


@pytest.mark.deep
def test_a_response_is_cancelled_at_another_server(tmp_path: Path) -> None:
    with _team(tmp_path, [[("count__append", {"text": "a", "sleep_s": 20})]]) as (servers, tools):
        first, second = servers.servers
        begun = _begin(first, background=True)
        tools.wait_counted(1)
        with client_of(second) as far, client_of(first) as near:
            cancelled = far.responses.cancel(begun.id)
            assert cancelled.status == "cancelled"
            assert near.responses.retrieve(begun.id) == cancelled


def test_a_key_begins_one_response_at_all_servers(tmp_path: Path) -> None:
    with _team(tmp_path, [[("count__append", {"text": "a"})]]) as (servers, tools):
        headers = {"idempotency-key": "once"}
        ids = {_begin(server, extra_headers=headers).id for server in (*servers.servers, *servers.servers)}
        assert len(ids) == 1
        assert tools.counted() == ["append"]


def test_an_approval_at_two_servers_is_one_call(tmp_path: Path) -> None:
    with _team(tmp_path, [[("count__append", {"text": "a", "sleep_s": 1})]]) as (servers, tools):
        asked = _begin(servers.servers[0], tool=ASK)

        def approve(server: Server) -> Response:
            while True:
                with contextlib.suppress(openai.ConflictError):  # another response is about to make the call
                    return _approve(server, asked)

        with ThreadPoolExecutor(2) as pool:
            for response in pool.map(approve, servers.servers):
                assert [one.output for one in calls_of(response)] == ["a"]
        assert tools.counted() == ["append"]


@pytest.mark.deep
def test_a_response_that_is_read_at_another_server_goes_on(tmp_path: Path) -> None:
    """It is no background response, and its first reader has left."""
    turns: list[list[tuple[str, Json]]] = [[("count__look", {"text": "a", "sleep_s": 4})]]
    with _team(tmp_path, turns) as (servers, tools):
        first, second = servers.servers
        tool: Any = NEVER
        with (
            client_of(first) as near,
            client_of(second) as far,
            near.responses.create(model="scripted", input="Go.", tools=[tool], stream=True) as stream,
        ):
            begun = next(iter(stream))
            assert begun.type == "response.created"
            with far.responses.retrieve(begun.response.id, stream=True) as other:
                next(iter(other))
                stream.close()
                *_, last = other
        assert last.type == "response.completed"
        assert last.response.output_text == "The tool has answered."
        assert tools.counted() == ["look"]


def test_a_frozen_server_makes_no_call_after_it_was_replaced(tmp_path: Path) -> None:
    """It is stopped between two calls. The other server goes on; the first one comes back and makes no call."""
    turns: list[list[tuple[str, Json]]] = [
        [("count__append", {"text": "first", "sleep_s": 1}), ("count__append", {"text": "second"})]
    ]
    with _team(tmp_path, turns) as (servers, tools):
        first, second = servers.servers
        begun = _begin(first, background=True)
        tools.wait_counted(1)
        first.send_signal(signal.SIGSTOP)  # its MCP server goes on, and answers
        second.wait_line("A server does not answer any more")
        response = _ended(second, begun.id)
        first.send_signal(signal.SIGCONT)
        first.wait_line("it did not answer for too long")
        assert _ended(first, begun.id) == response
        assert [one.status for one in calls_of(response)] == ["failed", "failed"]
        assert len(asks_of(response)) == 1
        assert tools.counted() == ["append"]


@pytest.mark.deep
def test_a_server_without_the_tools_says_so(tmp_path: Path) -> None:
    """It does not go on with the response, and loses nothing of it."""
    tools = Tools(tmp_path, [[("count__append", _SLOW)]])
    (tmp_path / "none.json").write_text('{"mcpServers": {}}')
    lacks = "does not have the MCP server count"
    with team(tmp_path, size=1, source=tools.source) as (servers, _), contextlib.ExitStack() as stack:
        (without,) = servers.servers

        def launch(*flags: str) -> Server:
            server = servers.launch(tools.source, "--mcp-servers", str(tmp_path / flags[0]), *flags[1:])
            return stack.enter_context(contextlib.closing(server)).wait_ready()

        first, other = launch("mcp.json", "--mcp-commands"), launch("none.json")
        begun = _begin(first, background=True)
        tools.wait_counted(1)
        with client_of(other) as client:
            assert client.responses.retrieve(begun.id).status == "in_progress"
        first.send_signal(signal.SIGKILL)
        other.wait_line(lacks)
        for server, message in ((other, lacks), (without, "does not have any MCP tools")):
            with client_of(server) as client, pytest.raises(openai.InternalServerError, match=message) as refused:
                client.responses.retrieve(begun.id)
            assert refused.value.status_code == 503
        second = launch("mcp.json", "--mcp-commands")
        response = _ended(second, begun.id)
        with pytest.raises(openai.InternalServerError, match=lacks):
            _approve(other, response)
        assert _approve(second, response).output_text == "The tool has answered."
        assert tools.counted() == ["append", "append"]
