"""kill -9 of real servers and engines under responses with MCP tools on a WebSocket, with OpenAI's client."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.clients.test_response_sockets import received
from tests.plugins.tool_loop.test_tool_kills import Lives, lives_of
from tests.plugins.tool_loop.test_tool_sockets import command, create
from tests.plugins.tool_loop.tool_servers import Json, asks_of, calls_of, client_of

pytest.importorskip("mcp")

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings(r"ignore:connect\(\) must be used:DeprecationWarning"),
]

_ENDS = ("response.completed", "response.incomplete", "response.failed")

Events = list[Any]  # Any: a union of half a hundred


def _seen_before_death(lives: Lives, number: int, **more: Any) -> Events:
    """Return the first events of a response, after which the server is killed."""
    with client_of(lives.server) as client, client.responses.connect() as connection:
        create(connection, "Go.", **more)
        seen: Events = []
        for event in connection:
            seen.append(event)
            if len(seen) == number or event.type in _ENDS:
                break
        lives.kill()
    return seen


def _rest(lives: Lives, seen: Events) -> Events:
    with client_of(lives.server) as client, client.responses.connect() as connection:
        command(connection, "retrieve", seen[0].response.id, starting_after=seen[-1].sequence_number)
        return received(connection)


@pytest.mark.parametrize("is_stored", [True, False])
def test_kills_at_events_that_a_client_has_seen(tmp_path: Path, is_stored: bool) -> None:
    turns: list[list[tuple[str, Json]]] = [
        [("count__append", {"text": "first"}), ("count__look", {"text": "second"})],
        [("count__append", {"text": "third"})],
    ]
    whole = 0
    with lives_of(tmp_path, turns) as lives:
        for number in (4, 12, 24, 34):
            lives.tools.counts.unlink(missing_ok=True)
            seen = _seen_before_death(lives, number, store=is_stored)
            if seen[-1].type not in _ENDS:
                seen += _rest(lives, seen)
            assert [event.sequence_number for event in seen] == list(range(len(seen)))
            response = seen[-1].response
            assert response.status == "completed"
            counted = lives.tools.counted()
            assert counted.count("append") <= 2
            is_unknown = any(call.status == "failed" for call in calls_of(response))
            assert bool(asks_of(response)) is is_unknown
            if not is_unknown:
                whole += 1
                assert [call.output for call in calls_of(response)] == ["first", "second", "third"]
                assert response.output_text == "The tool has answered."
    assert whole


def test_a_call_of_a_killed_server_is_approved_on_another_socket(tmp_path: Path) -> None:
    turns: list[list[tuple[str, Json]]] = [[("count__append", {"text": "a", "kill": "before"})]]
    with lives_of(tmp_path, turns) as lives:
        with client_of(lives.server) as client, client.responses.connect() as connection:
            create(connection, "Go.")
            seen: Events = []
            with contextlib.suppress(Exception):  # the tool kills the server
                for event in connection:
                    seen.append(event)
            lives.next()
        asked = _rest(lives, seen)[-1].response
        (ask,) = asks_of(asked)
        answer = {"type": "mcp_approval_response", "approval_request_id": ask.id, "approve": True}
        with client_of(lives.server) as client, client.responses.connect() as connection:
            create(connection, [answer], previous_response_id=asked.id)
            done = received(connection)[-1].response
        assert [call.output for call in calls_of(done)] == ["a"]
        assert lives.tools.counted() == ["append"]


def test_an_engine_that_dies_is_not_seen(tmp_path: Path) -> None:
    turns: list[list[tuple[str, Json]]] = [[("count__look", {"text": "one"})], [("count__look", {"text": "two"})]]
    with lives_of(tmp_path, turns, tokens_per_s=100) as lives:
        with client_of(lives.server) as client, client.responses.connect() as connection:
            create(connection, "Go.")
            seen: Events = [connection.recv()]
            lives.server.worker().kill()
            seen += received(connection)
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert [call.output for call in calls_of(seen[-1].response)] == ["one", "two"]


def test_a_server_that_is_stopped_during_a_call(tmp_path: Path) -> None:
    turns: list[list[tuple[str, Json]]] = [[("count__append", {"text": "slow", "sleep_s": 2})]]
    with lives_of(tmp_path, turns) as lives:
        with client_of(lives.server) as client, client.responses.connect() as connection:
            create(connection, "Go.", store=False)
            seen: Events = [connection.recv()]
            lives.tools.wait_counted(1)
            lives.server.send_signal(signal.SIGTERM)
            with contextlib.suppress(Exception):
                for event in connection:
                    if event.type != "error":
                        seen.append(event)
        lives.next()
        seen += _rest(lives, seen)
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert [call.output for call in calls_of(seen[-1].response)] == ["slow"]
        assert lives.tools.counted() == ["append"]
