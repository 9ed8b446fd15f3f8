"""Commands and frames of `/v1/ws`, as text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dialects.fake_server import FakeServer

from tailrace.dialects import websocket
from tailrace.dialects.bodies import read_json
from tailrace.dialects.facts import StreamFacts
from tailrace.dialects.websocket import (
    Cancel,
    Close,
    Create,
    FollowCommand,
    Frames,
    Ping,
    Unfollow,
    encode_pong,
    encode_refusal,
    encode_status,
    name_of,
)
from tailrace.errors import QueueFull, RequestError, SeqOutOfRange, TailraceError
from tailrace.types import End, Event, Failure, Record, Released, TextDelta, Usage

STREAM_ID = "Jk0vX1u3T0m3nq5lW8e1Rw"
SAYING = '"id":"a \\"b\\" \\u2028","stream_id":"Jk0vX1u3T0m3nq5lW8e1Rw"'
NAME = 'a "b" \u2028'


class _NoVocabulary:
    special_ids: frozenset[int] = frozenset()
    pieces: list[bytes] = []  # noqa: RUF012  # as the protocol has it

    def token_text(self, token_id: int) -> str:
        raise AssertionError


def parse(body: dict[str, Any]) -> websocket.Command | websocket.Create:
    return websocket.parse_create(body, FakeServer()) if body.get("type") == "create" else websocket.parse(body)


def _frames(name: str | None = NAME) -> Frames:
    return Frames(name, StreamFacts(Record(STREAM_ID, 1.0, "m"), _NoVocabulary()))


# Commands


def test_create_has_the_body_of_post_v1_streams() -> None:
    command = parse({"type": "create", "id": "a", "prompt": "Hi", "max_tokens": 5, "on_disconnect": "cancel"})
    assert isinstance(command, Create)
    assert command.name == "a"
    assert command.request.sampling.max_tokens == 5
    assert command.request.on_disconnect == "cancel"


@pytest.mark.parametrize(
    ("body", "command"),
    [
        ({"type": "follow", "id": "a", "last_event_id": f"{STREAM_ID}-7"}, FollowCommand("a", STREAM_ID, 7)),
        ({"type": "follow", "stream_id": STREAM_ID}, FollowCommand(None, STREAM_ID, 0)),
        ({"type": "follow", "stream_id": STREAM_ID, "after": 9}, FollowCommand(None, STREAM_ID, 9)),
        ({"type": "follow", "stream_id": STREAM_ID, "return_progress": True}, FollowCommand(None, STREAM_ID, 0, True)),
        ({"type": "unfollow", "id": "a"}, Unfollow("a")),
        ({"type": "cancel", "id": "a"}, Cancel("a", None)),
        ({"type": "cancel", "stream_id": STREAM_ID}, Cancel(None, STREAM_ID)),
        ({"type": "ping"}, Ping(None)),
        ({"type": "ping", "id": "a"}, Ping("a")),
    ],
)
def test_commands(body: dict[str, Any], command: object) -> None:
    assert parse(body) == command


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "type"),
        ({"type": "destroy"}, "type"),
        ({"type": 5}, "type"),
        ({"type": ["create"]}, "type"),
        ({"type": "create", "id": "a"}, "prompt"),
        ({"type": "create", "id": "a", "prompt": "Hi", "max_token": 5}, "max_token"),
        ({"type": "create", "id": 5, "prompt": "Hi"}, "id"),
        ({"type": "create", "id": "", "prompt": "Hi"}, "id"),
        ({"type": "create", "id": "a" * 129, "prompt": "Hi"}, "id"),
        ({"type": "follow"}, "stream_id"),
        ({"type": "follow", "stream_id": STREAM_ID, "last_event_id": f"{STREAM_ID}-7"}, "stream_id"),
        ({"type": "follow", "last_event_id": f"{STREAM_ID}-7", "after": 7}, "after"),
        ({"type": "follow", "last_event_id": "7"}, "last-event-id"),
        ({"type": "follow", "stream_id": STREAM_ID, "after": -1}, "after"),
        ({"type": "follow", "stream_id": STREAM_ID, "after": "7"}, "after"),
        ({"type": "follow", "stream_id": STREAM_ID, "form": 1}, "form"),
        ({"type": "unfollow"}, "id"),
        ({"type": "cancel"}, "id"),
        ({"type": "cancel", "id": "a", "why": "because"}, "why"),
        ({"type": "ping", "stream_id": STREAM_ID}, "stream_id"),
    ],
)
def test_a_refusal_names_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError if param != "last-event-id" else SeqOutOfRange) as raised:
        parse(body)
    assert raised.value.param == param


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    body=st.dictionaries(
        st.sampled_from(["type", "id", "stream_id", "last_event_id", "after", "prompt", "messages", "n", "x"]),
        st.sampled_from(["create", "follow", "unfollow", "cancel", "ping", STREAM_ID, f"{STREAM_ID}-1"]) | _JSON,
    )
)
def test_any_input_is_a_command_or_a_refusal(body: dict[str, Any]) -> None:
    try:
        parse(body)
    except TailraceError as error:
        frame = json.loads(encode_refusal(name_of(body), error))
        assert frame["type"] == "refused"
        assert frame["id"] == name_of(body)
        assert frame["error"]["message"]


@pytest.mark.parametrize("text", ["", "x", "[]", "5", '"create"', "{", '{"a":NaN}', '{"a":"\\ud800"}', "[" * 10_000])
def test_bodies_that_are_not_objects_are_refused(text: str) -> None:
    with pytest.raises(RequestError):
        read_json(text.encode())


@pytest.mark.parametrize("name", [None, 5, "a" * 129, ["a"]])
def test_valid_names(name: object) -> None:
    assert name_of({"id": name}) is None


# Frames


@pytest.mark.parametrize(
    ("event", "frame"),
    [
        (TextDelta("é\n", (5,)), f'{{"type":"delta",{SAYING},"seq":3,"text":"\\u00e9\\n","token_ids":[5]}}'),
        (TextDelta("{}", (5, 6)), f'{{"type":"delta",{SAYING},"seq":3,"text":"{{}}","token_ids":[5,6]}}'),
        (
            TextDelta("", (), 1, (), "stop", "END"),
            f'{{"type":"delta",{SAYING},"seq":3,"text":"","token_ids":[],'
            '"choice":1,"finish_reason":"stop","stop":"END"}',
        ),
        (
            End("done", Usage(2, 5)),
            f'{{"type":"done",{SAYING},"seq":3,"status":"done",'
            '"usage":{"prompt_tokens":2,"completion_tokens":5,"total_tokens":7}}',
        ),
        (
            End("error", Usage(2, 0), Failure("engine_unavailable", "It died.")),
            f'{{"type":"error",{SAYING},"seq":3,"status":"error",'
            '"usage":{"prompt_tokens":2,"completion_tokens":0,"total_tokens":2},'
            '"error":{"code":"engine_unavailable","message":"It died.","retryable":true}}',
        ),
        (
            Released("s", 3, Failure("lease_lost", "It went on.")),
            f'{{"type":"released",{SAYING},"seq":3,"status":"released",'
            '"error":{"code":"lease_lost","message":"It went on.","retryable":true,"stream_id":"s","last_seq":3}}',
        ),
    ],
    ids=["delta", "two tokens", "finish", "done", "error", "released"],
)
def test_an_event_is_a_frame(event: Event | Released, frame: str) -> None:
    assert _frames().event(3, event).decode() == frame


@pytest.mark.parametrize("status", ["done", "error", "cancelled", "interrupted"])
def test_a_terminal_event_says_in_its_type_how_it_ended(status: Any) -> None:
    assert json.loads(_frames().event(1, End(status, Usage(1, 1))))["type"] == status


def test_the_first_event_has_no_parts_of_sse() -> None:
    assert set(json.loads(_frames().event(1, TextDelta("a", (1,))))) == {
        "type", "id", "stream_id", "seq", "text", "token_ids",
    }  # fmt: skip


def test_answers_to_commands() -> None:
    frames = _frames()
    assert frames.created().decode() == f'{{"type":"created",{SAYING}}}'
    assert frames.following(4).decode() == f'{{"type":"following",{SAYING},"after":4}}'
    assert frames.ended(4).decode() == f'{{"type":"ended",{SAYING},"after":4}}'
    assert frames.unfollowed(4).decode() == f'{{"type":"unfollowed",{SAYING},"seq":4}}'
    assert encode_pong(None) == b'{"type":"pong"}'
    assert encode_pong(NAME) == b'{"type":"pong","id":"a \\"b\\" \\u2028"}'
    assert json.loads(encode_status("a", STREAM_ID, "cancelled")) == {
        "type": "status",
        "id": "a",
        "stream_id": STREAM_ID,
        "status": "cancelled",
    }


def test_a_stream_without_a_name_is_called_by_its_id() -> None:
    assert json.loads(_frames(None).created())["id"] == STREAM_ID
    assert json.loads(encode_status(None, STREAM_ID, "done"))["id"] == STREAM_ID


def test_a_refusal_is_the_error_of_http() -> None:
    assert json.loads(encode_refusal("a", QueueFull("Full.", retry_after_s=2.5))) == {
        "type": "refused",
        "id": "a",
        "error": {"message": "Full.", "type": "rate_limit_error", "code": "overloaded", "param": None},
        "retry_after_s": 2.5,
    }
    assert "retry_after_s" not in json.loads(encode_refusal(None, RequestError("No.")))


def test_a_close_reason_is_cut_between_characters() -> None:
    assert Close.with_reason(1008, "🌊" * 50).reason == "🌊" * 30


def test_the_page_names_every_frame_and_every_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wires" / "websocket.md").read_text()
    named = "create follow unfollow cancel ping created following ended unfollowed status pong refused delta done error"
    for word in [*named.split(), "cancelled", "interrupted"]:
        assert re.search(rf'[`"]{word}[`"]', page), word
    assert re.findall(r"^\| (1\d\d\d) \|", page, re.MULTILINE) == re.findall(r"\b(10\d\d)\b", websocket.__doc__ or "")


def test_what_a_model_recommends_comes_after_what_a_request_says() -> None:
    command = websocket.parse_create(
        {"type": "create", "prompt": "Hi", "temperature": 0.5},
        FakeServer(recommended_sampling={"temperature": 1, "top_k": 20}),
    )
    assert (command.request.sampling.top_k, command.request.sampling.temperature) == (20, 0.5)
