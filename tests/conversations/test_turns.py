"""The items that a stream adds to its conversation."""

from __future__ import annotations

import json

import pytest
from tests.dialects.fake_server import FakeServer, parsed
from tests.dialects.transcripts import facts

from tailrace.conversations.items import Item
from tailrace.conversations.turns import Spoken, Turn, read_turn
from tailrace.dialects import openai
from tailrace.dialects.wire import GenerateCall
from tailrace.types import CallReading, End, Event, TextDelta, Usage
from tailrace_outer.responses import responses_wire

_CALL = '<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>'
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_a_turn_is_read_unchanged() -> None:
    turn = Turn(
        conversation_id="c", parent_id="p", input_items=(Item(role="user", text="é\u2028"),), calls=CallReading()
    )
    assert read_turn(turn.encode()) == turn


def test_input_and_answer_follow_each_other() -> None:
    turn = Turn(conversation_id="c", parent_id="p", input_items=(Item(role="system"), Item(role="user", text="Hi")))
    items = turn.input("s", 1.0)
    assert [(item.item_id, item.parent_id) for item in items] == [("msg_s_in0", "p"), ("msg_s_in1", "msg_s_in0")]
    (waiting,) = turn.answer("s", Spoken(), "msg_s_in1", 1.0)
    assert (waiting.status, waiting.text, waiting.parent_id) == ("in_progress", "", "msg_s_in1")
    (answer,) = turn.answer("s", Spoken("Well", "completed"), "msg_s_in1", 1.0)
    assert (answer.item_id, answer.status, answer.text) == (waiting.item_id, "completed", "Well")
    assert {item.stream_id for item in (waiting, answer)} == {"s"}
    assert {item.stream_id for item in items} == {""}


def test_an_answer_that_failed_at_once_is_an_item() -> None:
    (answer,) = Turn(conversation_id="c", calls=CallReading()).answer("s", Spoken("", "incomplete"), None, 0.0)
    assert (answer.role, answer.text, answer.status) == ("assistant", "", "incomplete")


def test_an_answer_has_its_given_beginning() -> None:
    for calls in (None, CallReading()):
        turn = Turn(conversation_id="c", prefix="Once ", calls=calls)
        (answer,) = turn.answer("s", Spoken("upon", "completed"), None, 0.0)
        assert answer.text == "Once upon"


def _ended(text: str) -> list[Event]:
    return [TextDelta(text, (1,), finish_reason="stop"), End("done", Usage(1, 1))]


def _turn(call: GenerateCall) -> Turn:
    return read_turn(call.request.turn)


@pytest.mark.parametrize("text", [f"So: {_CALL}{_CALL} Done.", _CALL, "No call.", f"{_CALL} and <tool_call>half"])
def test_calls_have_the_ids_that_the_client_has_seen(text: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [_TOOL], "conversation": "c"}
    call = openai.parse_chat(parsed(body, server=FakeServer()))
    seen = facts(stream_id="s", memo=call.request.memo)
    message = json.loads(call.view.open(seen).whole(_ended(text)))["choices"][0]["message"]
    kept = _turn(call).answer("s", Spoken(text, "completed"), None, 0.0)
    calls = [item for item in kept if item.kind == "function_call"]
    assert "".join(item.text for item in kept if item.kind == "message") == (message["content"] or "")
    assert [(item.call_id, item.name, item.text) for item in calls] == [
        (one["id"], one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", [])
    ]


@pytest.mark.parametrize("text", [f"So: {_CALL}{_CALL} Done.", _CALL, "No call."])
def test_items_of_a_response_are_those_of_the_conversation(text: str) -> None:
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    call = responses_wire.parse(parsed({"input": "Hi", "tools": [tool], "conversation": "c"}, server=FakeServer()))
    seen = facts(stream_id="s", memo=call.request.memo)
    output = json.loads(call.view.open(seen).whole(_ended(text)))["output"]
    kept = _turn(call).answer("s", Spoken(text, "completed"), None, 0.0)
    assert [item.item_id for item in kept] == [item["id"] for item in output]
    assert [item.call_id for item in kept] == [item.get("call_id", "") for item in output]
