"""Parts of messages are never dropped silently."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.dialects.fake_server import chat, native

from tailrace.dialects import GenerateCall
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.types import Message, ToolCall

both = pytest.mark.parametrize("parse", [native, chat])
Parse = Callable[[dict[str, Any]], GenerateCall]  # Any: JSON


def body(**message: Any) -> dict[str, Any]:  # Any: JSON
    return {"messages": [{"role": "user", **message}]}


def call(**function: Any) -> dict[str, Any]:  # Any: JSON
    return {"id": "call_1", "type": "function", "function": {"name": "look", **function}}


def test_an_unknown_field_is_refused_or_named() -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        native(body(content="hi", name="me"))
    assert caught.value.param == "messages[].name"
    assert chat(body(content="hi", name="me")).ignored == ("messages[].name",)


def test_unknown_fields_are_named_at_any_depth() -> None:
    given = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]},
            {"role": "assistant", "tool_calls": [call(arguments={"free": {"form": 1}}, strict=True) | {"index": 0}]},
            {"role": "tool", "content": "b", "tool_call_id": "call_1"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True, "more": 1},
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"any": {"thing": 1}}, "x": 1}}],
    }
    assert chat(given).ignored == (
        "messages[].content[].cache_control",
        "messages[].tool_calls[].function.strict",
        "messages[].tool_calls[].index",
        "stream_options.more",
        "tools[].function.x",
    )


@both
@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
def test_a_message_without_content_is_refused(parse: Parse, role: str) -> None:
    for message in ({}, {"content": None}):
        with pytest.raises(RequestError) as caught:
            parse({"messages": [{"role": role, **message}]})
        assert caught.value.param == "messages"


@both
def test_calls_of_tools_and_their_results(parse: Parse) -> None:
    given = {
        "messages": [
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": None, "tool_calls": [call(arguments='{"at": "a \\"b\\""}')]},
            {"role": "tool", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "re"}],
             "tool_call_id": "call_1"},
        ]
    }  # fmt: skip
    assert parse(given).request.messages == (
        Message("user", "Where?"),
        Message("assistant", "", (ToolCall("call_1", "look", '{"at": "a \\"b\\""}'),)),
        Message("tool", "here", (), "call_1"),
    )


@both
def test_arguments_may_be_an_object_as_some_clients_keep_them(parse: Parse) -> None:
    calling = {"role": "assistant", "tool_calls": [call(arguments={"a": ["é", {"b": None}]})]}
    _, message = parse({"messages": [{"role": "user", "content": "Look."}, calling]}).request.messages
    assert json.loads(message.tool_calls[0].arguments) == {"a": ["é", {"b": None}]}


@both
@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_only_an_assistant_calls(parse: Parse, role: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse({"messages": [{"role": role, "content": "a", "tool_calls": [call()]}]})
    assert caught.value.param == "messages"


@both
@pytest.mark.parametrize(
    "calls",
    [[{}], [{"id": "1"}], [{"function": {}}], [{"function": {"name": 1}}], [call(arguments=[1])], "look", [None],
     [call() | {"type": "code_interpreter"}]],
)  # fmt: skip
def test_an_invalid_call(parse: Parse, calls: object) -> None:
    with pytest.raises(RequestError) as caught:
        parse({"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]})
    assert str(caught.value.param).startswith("messages[0].tool_calls")
    assert "look" not in caught.value.message
