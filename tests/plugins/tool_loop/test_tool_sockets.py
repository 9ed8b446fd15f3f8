"""OpenAI's client uses the tools of MCP servers on the WebSocket of Responses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from openai.lib.responses_websocket import ResponsesWebSocketLimits, ResponsesWebSocketSession
from openai.resources.responses.responses import ResponsesConnection
from tests.clients.test_response_sockets import cut, received
from tests.plugins.tool_loop.test_mcp_tools import ASK, NEVER, Rig
from tests.plugins.tool_loop.tool_servers import Json, asks_of, calls_of
from tests.waiting import LONG_S, until

pytest.importorskip("mcp")

# The client's own use of its library.
pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used:DeprecationWarning")

_LIMITS = ResponsesWebSocketLimits(
    max_lanes=8, max_events_per_lane=2000, max_events=9000, max_bytes_per_lane=2**23, max_bytes=2**24
)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("sockets"))
    with contextlib.closing(rig.server):
        yield rig


@pytest.fixture
def connection(client: OpenAI) -> Iterator[ResponsesConnection]:
    with client.responses.connect() as opened:
        yield opened


def create(connection: ResponsesConnection, text: Any, tool: Json = NEVER, **more: Any) -> None:  # Any: JSON
    body = {"type": "response.create", "model": "scripted", "input": text, "tools": [tool], **more}
    connection.send_raw(json.dumps(body))


def answered(connection: ResponsesConnection, text: Any, tool: Json = NEVER, **more: Any) -> Any:  # Any: a response
    create(connection, text, tool, **more)
    last = received(connection)[-1]
    assert last.type == "response.completed", last
    return last.response


def command(connection: ResponsesConnection, kind: str, response_id: str, **more: object) -> None:
    connection.send_raw(json.dumps({"type": f"response.{kind}", "response_id": response_id, **more}))


def test_the_events_are_those_over_http(rig: Rig, client: OpenAI, connection: ResponsesConnection) -> None:
    before = len(rig.tools.counted())
    create(connection, "one append hello", stream_id="a")
    events = received(connection)
    assert rig.tools.counted()[before:] == ["append"]
    assert {event.stream_id for event in events} == {"a"}
    response = events[-1].response
    assert (calls_of(response)[0].output, response.output_text) == ("hello", "It said: hello")
    read = client.responses.retrieve(response.id, stream=True)
    assert [event.to_dict() for event in read] == [event.to_dict(exclude_unset=True) for event in map(_bare, events)]
    assert client.responses.retrieve(response.id) == response


def _bare(event: Any) -> Any:  # Any: a union of half a hundred
    del event.stream_id
    return event


def test_several_at_once_on_one_socket(client: OpenAI) -> None:
    with client.responses.connect() as opened, ResponsesWebSocketSession(opened, limits=_LIMITS) as session:
        lanes = {name: session.lane(name) for name in ("one", "two", "three")}
        for name, lane in lanes.items():
            body: Any = {"type": "response.create", "model": "scripted", "input": f"one look {name}", "tools": [NEVER]}
            lane.send(body)
        plain = session.lane("plain")
        plain.send({"type": "response.create", "model": "scripted", "input": "Hi."})
        for name, lane in lanes.items():
            assert lane.get_final_response(timeout=LONG_S).output_text == f"It said: {name}"
        assert plain.get_final_response(timeout=LONG_S).output_text == "Hello."


def test_a_call_is_approved_on_the_socket(rig: Rig, connection: ResponsesConnection) -> None:
    before = len(rig.tools.counted())
    asked = answered(connection, "one append yes", ASK)
    (ask,) = asks_of(asked)
    answer = {"type": "mcp_approval_response", "approval_request_id": ask.id, "approve": True}
    assert len(rig.tools.counted()) == before
    done = answered(connection, [answer], ASK, previous_response_id=asked.id)
    assert (calls_of(done)[0].approval_request_id, done.output_text) == (ask.id, "It said: yes")
    again = answered(connection, [answer], ASK, previous_response_id=asked.id)
    assert calls_of(again)[0].output == "yes"
    assert rig.tools.counted()[before:] == ["append"]
    refused = answered(connection, "one append no", ASK)
    answer = {**answer, "approval_request_id": asks_of(refused)[0].id, "approve": False}
    done = answered(connection, [answer], ASK, previous_response_id=refused.id)
    assert done.output_text == "It said: The user did not allow this call."
    assert rig.tools.counted()[before:] == ["append"]


def test_it_follows_earlier_responses(client: OpenAI, connection: ResponsesConnection) -> None:
    plain = client.responses.create(model="scripted", input="Hi.")
    first = answered(connection, "one look a", previous_response_id=plain.id)
    assert (first.output_text, first.previous_response_id) == ("It said: a", plain.id)
    create(connection, "And?", previous_response_id=first.id, tools=None)
    assert received(connection)[-1].response.output_text == "Hello."


def test_a_response_is_cancelled(rig: Rig, connection: ResponsesConnection) -> None:
    before = len(rig.tools.counted())
    create(connection, "wait", stream_id="slow")
    response_id = connection.recv().response.id  # type: ignore[union-attr]
    rig.tools.wait_counted(before + 1)
    command(connection, "cancel", response_id)
    last = received(connection)[-1]
    assert (last.type, last.response.status, last.stream_id) == ("response.incomplete", "cancelled", "slow")
    assert calls_of(last.response)[0].status == "incomplete"
    rig.go.touch()
    command(connection, "cancel", response_id)
    assert received(connection)[-1].error.code == "unknown_stream"
    assert answered(connection, "one look free", stream_id="slow").output_text == "It said: free"


def test_a_lost_connection_is_resumed_where_it_was(client: OpenAI) -> None:
    seen: list[Any] = []  # Any: a union of half a hundred

    def place(_: object) -> Any:  # Any: what the client takes
        query = {"response_id": seen[0].response.id, "starting_after": str(seen[-1].sequence_number)}
        return {"extra_query": query}

    with client.responses.connect(on_reconnecting=place, initial_delay=0.01) as connection:
        create(connection, "both look first look second", store=False)
        for event in connection:
            seen.append(event)
            if event.type == "response.completed":
                break
            if len(seen) in (1, 9):
                cut(connection)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert [call.output for call in calls_of(seen[-1].response)] == ["first", "second"]


def test_a_socket_that_is_closed_cancels_its_response(rig: Rig, client: OpenAI) -> None:
    def closed_in_a_call(**more: Any) -> str:  # Any: JSON
        before = len(rig.tools.counted())
        with client.responses.connect() as connection:
            create(connection, "wait", **more)
            response_id: str = connection.recv().response.id  # type: ignore[union-attr]
            rig.tools.wait_counted(before + 1)
        return response_id

    foreground = closed_in_a_call()
    until(lambda: client.responses.retrieve(foreground).status == "cancelled")
    rig.go.touch()
    until(lambda: not rig.go.exists())
    background = closed_in_a_call(background=True)
    rig.go.touch()
    until(lambda: client.responses.retrieve(background).status == "completed")


def test_a_socket_that_is_closed_leaves_what_http_began(rig: Rig, client: OpenAI) -> None:
    """It has found the response by its Idempotency-Key. The other client has left, and will come back."""
    before = len(rig.tools.counted())
    asked = {"model": "scripted", "input": "wait", "tools": [NEVER]}
    headers = {"idempotency-key": "http", "x-tailrace-linger": "600"}
    with rig.server.wire() as wire:
        wire.send("POST", "/v1/responses", json.dumps(asked).encode(), headers)
        rig.tools.wait_counted(before + 1)
    with client.responses.connect() as connection:
        create(connection, "wait", idempotency_key="http")
        response_id: str = connection.recv().response.id  # type: ignore[union-attr]
    with client.responses.connect() as connection:  # the end of the other one has been noticed before that of this one
        assert answered(connection, "one look free").output_text == "It said: free"
    rig.go.touch()
    until(lambda: client.responses.retrieve(response_id).status == "completed")


def test_what_is_not_stored_is_for_its_own_socket(client: OpenAI, connection: ResponsesConnection) -> None:
    first = answered(connection, "one look secret", store=False)
    with pytest.raises(Exception, match="no such response"):
        client.responses.retrieve(first.id)
    with client.responses.connect() as other:
        create(other, "Go on.", previous_response_id=first.id)
        assert received(other)[-1].error.code == "unknown_stream"
        command(other, "retrieve", first.id)
        assert received(other)[-1].response == first
    assert answered(connection, "Go on.", previous_response_id=first.id, store=False).output_text == "Hello."
    connection.close()

    def is_gone() -> bool:
        with client.responses.connect() as other:
            command(other, "retrieve", first.id)
            return bool(received(other)[-1].type == "error")

    until(is_gone)


def test_a_create_that_is_sent_again_finds_its_response(rig: Rig, connection: ResponsesConnection) -> None:
    before = len(rig.tools.counted())
    create(connection, "one append once", idempotency_key="socket")
    first = received(connection)
    create(connection, "one append once", idempotency_key="socket")
    assert [event.to_dict() for event in received(connection)] == [event.to_dict() for event in first]
    assert rig.tools.counted()[before:] == ["append"]
    create(connection, "one append twice", idempotency_key="socket")
    last = received(connection)[-1]
    assert (last.status, last.error.code) == (409, "idempotency_conflict")


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"tools": [{"type": "mcp"}]}, 400, "invalid_request"),
        ({"tools": [NEVER | {"server_label": "other"}]}, 403, "forbidden"),
        ({"temperature": "hot"}, 400, "invalid_request"),
        ({"model": "another"}, 404, "model_not_found"),
        ({"previous_response_id": "resp_mcp_" + "0" * 32}, 404, "unknown_stream"),
        ({"type": "response.retrieve", "response_id": "resp_mcp_" + "0" * 32}, 404, "unknown_stream"),
        ({"type": "response.cancel", "response_id": "resp_mcp_" + "0" * 32}, 404, "unknown_stream"),
    ],
)
def test_an_error_is_an_event_and_the_socket_stays(
    connection: ResponsesConnection, fields: Json, status: int, code: str
) -> None:
    whole = {"type": "response.create", "model": "scripted", "input": "Hi.", "tools": [NEVER], "stream_id": "a"}
    given = {**(whole if "type" not in fields else {"stream_id": "a"}), **fields}
    if fields.get("type") == "response.cancel":
        del given["stream_id"]
    connection.send_raw(json.dumps(given))
    (error,) = received(connection)
    assert (error.type, error.status, error.error.code) == ("error", status, code)
    assert answered(connection, "Hi.").output_text == "Hello."


def test_nothing_is_left_after_the_last_event(connection: ResponsesConnection) -> None:
    create(connection, "Hi.")
    *_, last = received(connection)
    command(connection, "retrieve", last.response.id, starting_after=last.sequence_number)
    assert received(connection)[-1].error.code == "seq_out_of_range"
    command(connection, "retrieve", last.response.id, starting_after=last.sequence_number - 1)
    (event,) = received(connection)
    assert event.to_dict() == last.to_dict()


def test_fields_without_effect_are_named(connection: ResponsesConnection) -> None:
    create(connection, "Hi.", truncation="auto")
    first, *_, last = received(connection)
    assert first.to_dict()["ignored"] == ["truncation"]
    assert "ignored" not in last.to_dict()
