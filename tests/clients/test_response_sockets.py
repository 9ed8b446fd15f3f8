"""`client.responses.connect()`: OpenAI's client on the WebSocket of `/v1/responses`, with only the server's address."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.lib.responses_websocket import (
    AsyncResponsesWebSocketSession,
    ResponsesWebSocketAccumulator,
    ResponsesWebSocketLimits,
    ResponsesWebSocketSession,
)
from openai.resources.responses.responses import ResponsesConnection
from openai.types.responses import Response
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.waiting import LONG_S, until

# The client's own use of its library.
pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used:DeprecationWarning")

PROMPT = "Tell me of rivers."
SEED = 13
COUNT = 24
ANSWER = Answer(chat_ids(PROMPT), COUNT, SEED)
CREATE: dict[str, Any] = {
    "type": "response.create",
    "model": "scripted",
    "input": PROMPT,
    "max_output_tokens": COUNT,
    "seed": SEED,
}
LIMITS = ResponsesWebSocketLimits(
    max_lanes=8, max_events_per_lane=2000, max_events=9000, max_bytes_per_lane=2**23, max_bytes=2**24
)
ENDS = ("response.completed", "response.failed", "response.incomplete", "error")

Events = list[Any]  # Any: a union of half a hundred


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=LONG_S)


@pytest.fixture
def connection(server: Server) -> Iterator[ResponsesConnection]:
    with client_of(server) as client, client.responses.connect() as opened:
        yield opened


def create(connection: ResponsesConnection, **fields: object) -> None:
    connection.send_raw(json.dumps({**CREATE, **fields}))


def cut(connection: ResponsesConnection) -> None:
    """End the connection without a close frame."""
    vars(connection)["_connection"].socket.close()


def received_one(connection: ResponsesConnection) -> Any:
    return connection.recv()


def received(connection: ResponsesConnection) -> Events:
    """Return the events up to the next end of a response, or the next error."""
    events: Events = []
    while not events or events[-1].type not in ENDS:
        events.append(connection.recv())
    return events


def text_of(response: Response) -> str:
    return response.output_text


def test_events_of_a_response(connection: ResponsesConnection) -> None:
    create(connection)
    events = received(connection)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == ANSWER.text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER.text
    assert all(event.stream_id is None for event in events)


def test_the_methods_of_the_client(connection: ResponsesConnection) -> None:
    connection.response.create(model="scripted", input=PROMPT, max_output_tokens=5, temperature=0)
    first = received(connection)[-1].response
    connection.response.create(model="scripted", input="Go on.", previous_response_id=first.id, max_output_tokens=5)
    second = received(connection)[-1].response
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    connection.response.steer(input="Faster.", previous_response_id=second.id)
    failed = received_one(connection)
    assert failed.type == "response.steer.failed"
    assert (failed.error.code, failed.steer.input) == ("steering_not_supported", "Faster.")


def test_its_events_are_those_of_the_http_route(server: Server, connection: ResponsesConnection) -> None:
    create(connection)
    events = received(connection)
    with client_of(server) as client:
        stream = client.responses.retrieve(events[0].response.id, stream=True, starting_after=3)
        assert [event.to_dict() for event in stream] == [event.to_dict() for event in events[4:]]


def test_lanes_run_beside_each_other(paced: Server) -> None:
    with (
        client_of(paced) as client,
        client.responses.connect() as connection,
        ResponsesWebSocketSession(connection, limits=LIMITS) as session,
    ):
        lanes = {name: session.lane(name) for name in ("one", "two", "three")}
        for number, lane in enumerate(lanes.values()):
            lane.send({**CREATE, "seed": number})  # type: ignore[arg-type]  # `seed` is ours
        first = [lane.recv(timeout=LONG_S).type for lane in lanes.values()]
        assert first == ["response.created"] * 3  # all of them, before any has ended
        finals = [lane.get_final_response(timeout=LONG_S) for lane in lanes.values()]
        assert list(map(text_of, finals)) == [Answer(chat_ids(PROMPT), COUNT, seed).text for seed in range(3)]


def test_a_lane_answers_in_order(connection: ResponsesConnection) -> None:
    for seed in range(4):
        create(connection, stream_id="one", seed=seed)
    finals = [received(connection) for _ in range(4)]
    for seed, events in enumerate(finals):
        assert {event.stream_id for event in events} == {"one"}
        assert events[-1].response.output_text == Answer(chat_ids(PROMPT), COUNT, seed).text


def test_the_accumulator_of_the_client(connection: ResponsesConnection) -> None:
    accumulator = ResponsesWebSocketAccumulator()
    create(connection, stream_id="one")
    for event in received(connection):
        accumulator.add_event(event)
    assert accumulator.snapshot().output_text == ANSWER.text
    assert text_of(accumulator.get_final_response()) == ANSWER.text


async def test_the_async_session(server: Server) -> None:
    async with (
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=LONG_S) as client,
        client.responses.connect() as connection,
        AsyncResponsesWebSocketSession(connection, limits=LIMITS) as session,
    ):
        lane = session.lane("one")
        await lane.send(CREATE)  # type: ignore[arg-type]
        assert text_of(await lane.get_final_response()) == ANSWER.text


def test_a_warmup_has_no_output_and_can_be_continued(connection: ResponsesConnection) -> None:
    connection.response.create(model="scripted", instructions="Be brief.", generate=False)
    events = received(connection)
    warm = events[-1].response
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.completed"]
    assert (warm.status, warm.output) == ("completed", [])
    create(connection, previous_response_id=warm.id)
    assert received(connection)[-1].response.output_text == ANSWER.text  # as without it
    before: Any = [{"type": "message", "role": "developer", "content": "Be brief."}]  # what Codex CLI begins with
    connection.response.create(model="scripted", input=before, generate=False)
    assert received(connection)[-1].response.status == "completed"


def test_what_is_not_stored_is_continued_on_its_own_socket_only(
    server: Server, connection: ResponsesConnection
) -> None:
    create(connection, store=False)
    first = received(connection)[-1].response
    create(connection, store=False, previous_response_id=first.id, input="Go on.")
    assert received(connection)[-1].response.usage.input_tokens > first.usage.input_tokens
    with client_of(server) as client, client.responses.connect() as other:
        create(other, previous_response_id=first.id)
        (error,) = received(other)
    assert (error.status, error.error.code) == (400, "previous_response_not_found")


def test_a_response_is_cancelled(paced: Server) -> None:
    with client_of(paced) as client, client.responses.connect() as connection:
        create(connection, max_output_tokens=2000, stream_id="long")
        response_id = received_one(connection).response.id
        connection.send_raw(json.dumps({"type": "response.cancel", "response_id": response_id}))
        last = received(connection)[-1]
        assert (last.type, last.response.status, last.stream_id) == ("response.incomplete", "cancelled", "long")
        create(connection, stream_id="long")  # the lane is free
        assert received(connection)[-1].response.output_text == ANSWER.text


def test_a_socket_that_is_closed_cancels_its_responses(paced: Server) -> None:
    with client_of(paced) as client:
        with client.responses.connect() as connection:
            create(connection, max_output_tokens=2000)
            foreground = received_one(connection).response.id
            create(connection, max_output_tokens=300, background=True, stream_id="on")
            events: Iterator[Any] = iter(connection)
            background = next(event.response.id for event in events if event.stream_id == "on")
        until(lambda: client.responses.retrieve(foreground).status == "cancelled")
        assert client.responses.retrieve(background).status == "in_progress"
        client.responses.cancel(background)


def test_a_lost_connection_is_resumed_where_it_was(paced: Server) -> None:
    """`on_reconnecting` of the client puts the place into the URL; the loop over the events just goes on."""
    seen: Events = []
    with (
        client_of(paced) as client,
        client.responses.connect(
            on_reconnecting=lambda _: {
                "extra_query": {
                    "response_id": seen[0].response.id,
                    "starting_after": str(seen[-1].sequence_number),
                }
            },
            initial_delay=0.01,
        ) as connection,
    ):
        create(connection)
        for event in connection:
            seen.append(event)
            if event.type in ENDS:
                break
            if len(seen) == 8:
                cut(connection)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].response.output_text == ANSWER.text


def test_several_responses_are_taken_up_on_another_socket(paced: Server) -> None:
    with client_of(paced) as client:
        with client.responses.connect() as connection:
            event: Any
            begun: dict[str, str] = {}
            for name in ("a", "b"):
                create(connection, stream_id=name, seed=len(begun))
                while (event := connection.recv()).type != "response.created":
                    pass
                begun[name] = event.response.id
            cut(connection)
            with contextlib.suppress(Exception):
                connection.recv()
        with (
            client.responses.connect() as connection,
            ResponsesWebSocketSession(connection, limits=LIMITS) as session,
        ):
            for seed, (name, response_id) in enumerate(begun.items()):
                lane = session.lane(name)
                again: Any = {"type": "response.retrieve", "response_id": response_id, "stream_id": name}
                lane.send(again)
                final = lane.get_final_response(timeout=LONG_S)
                assert final.id == response_id
                assert text_of(final) == Answer(chat_ids(PROMPT), COUNT, seed).text


def test_a_create_that_is_sent_again_finds_its_response(connection: ResponsesConnection) -> None:
    create(connection, idempotency_key="once", seed=None)
    first = received(connection)
    create(connection, idempotency_key="once", seed=None)
    assert [event.to_dict() for event in received(connection)] == [event.to_dict() for event in first]
    create(connection, idempotency_key="once", seed=1)
    (error,) = received(connection)
    assert error.status == 409


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"type": "response.begin"}, 400, "invalid_request", "type"),
        ({"stream_id": "a lane"}, 400, "invalid_stream_id", "stream_id"),
        ({"stream_id": 7}, 400, "invalid_stream_id", "stream_id"),
        ({"input": 7}, 400, "invalid_request", "input"),
        ({"model": "another"}, 404, "model_not_found", "model"),
        ({"previous_response_id": "resp_no"}, 400, "previous_response_not_found", "previous_response_id"),
        ({"temperature": 9}, 400, "invalid_request", "temperature"),
        ({"idempotency_key": ["x"]}, 400, "invalid_request", "idempotency_key"),
        ({"conversation": "conv_no"}, 404, "conversation_not_found", "conversation"),
        ({"type": "response.retrieve"}, 400, "invalid_request", None),
        ({"type": "response.retrieve", "response_id": "resp_no"}, 404, "unknown_stream", None),
        ({"type": "response.cancel", "response_id": "resp_no"}, 404, "unknown_stream", "response_id"),
        ({"type": "response.cancel"}, 400, "invalid_request", None),
        ({"type": "response.steer"}, 400, "invalid_request", None),
    ],
)
def test_an_error_is_an_event_and_the_socket_stays(
    connection: ResponsesConnection, fields: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    body = {**CREATE, **fields} if fields.get("type", "response.create") == "response.create" else fields
    connection.send_raw(json.dumps(body))
    (error,) = received(connection)
    assert (error.type, error.status, error.error.code, error.error.param) == ("error", status, code, param)
    create(connection, max_output_tokens=2)
    assert received(connection)[-1].type == "response.incomplete"


def test_an_error_names_its_lane(connection: ResponsesConnection) -> None:
    create(connection, stream_id="one", temperature=9)
    (error,) = received(connection)
    assert error.stream_id == "one"


def test_a_prompt_that_is_too_long_fails_in_the_stream(connection: ResponsesConnection) -> None:
    create(connection, input="x" * 70_000)
    last = received(connection)[-1]
    assert (last.type, last.response.error.code) == ("response.failed", "context_length_exceeded")
    create(connection, max_output_tokens=2)
    assert received(connection)[0].type == "response.created"  # and no error behind the failed one


def test_fields_without_effect_are_named(connection: ResponsesConnection) -> None:
    create(connection, truncation="auto", tools=[{"type": "mcp", "server_label": "none"}], max_output_tokens=2)
    assert sorted(received_one(connection).to_dict()["ignored"]) == ["tools[0] (mcp)", "truncation"]
    assert "ignored" not in received(connection)[-1].to_dict()


def test_a_resumed_response_must_exist(server: Server) -> None:
    with client_of(server) as client:
        with client.responses.connect(extra_query={"response_id": "resp_no"}) as connection:
            (error,) = received(connection)
            assert (error.status, error.error.code) == (404, "unknown_stream")
        with client.responses.connect() as connection:
            create(connection, max_output_tokens=2)
            *_, last = received(connection)
            again = {"type": "response.retrieve", "response_id": last.response.id}
            connection.send_raw(json.dumps({**again, "starting_after": last.sequence_number}))
            (error,) = received(connection)
            assert error.error.code == "seq_out_of_range"
            connection.send_raw(json.dumps({**again, "starting_after": last.sequence_number - 1}))
            (event,) = received(connection)
            assert event.to_dict() == last.to_dict()
