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
        "stream_options.more",
        "tools[].function.x",
    )


@both
@pytest.mark.parametrize("role", ["system", "developer", "assistant", "user", "tool"])
def test_a_message_may_have_no_content(parse: Parse, role: str) -> None:
    messages: tuple[dict[str, object], ...] = ({}, {"content": None}, {"content": []})
    for message in messages:
        given = [{"role": "user", "content": "Hi"}, {"role": role, **message}, {"role": "user", "content": "Ho"}]
        assert [one.content for one in parse({"messages": given}).request.messages] == ["Hi", "", "Ho"]


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


@pytest.mark.parametrize("field", ["tool_calls", "function_call", "reasoning_content", "reasoning"])
@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_only_an_assistant_calls_and_thinks(role: str, field: str) -> None:
    value = {"tool_calls": [call()], "function_call": {"name": "look"}}.get(field, "Hm")
    given = {"messages": [{"role": "user", "content": "Hi"}, {"role": role, "content": "a", field: value}]}
    assert chat(given).ignored == (f"messages[].{field}",)
    assert chat(given).request.messages[1].content == "a"
    with pytest.raises(UnsupportedParameter):
        native(given)


@both
@pytest.mark.parametrize(
    "calls",
    [[{"function": {}}], [{"function": {"name": 1}}], "look", [None], [call() | {"id": 5}]],
)  # fmt: skip
def test_an_invalid_call(parse: Parse, calls: object) -> None:
    with pytest.raises(RequestError) as caught:
        parse({"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]})
    assert str(caught.value.param).startswith("messages[0].tool_calls")
    assert "look" not in caught.value.message


# Arguments of calls


@both
@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ("", {}),
        (" \n", {}),
        ("null", {}),
        (None, {}),
        ([], {}),
        ("[]", {}),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ('{"path": "a', {"INVALID_JSON": '{"path": "a'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ([1], {"INVALID_JSON": "[1]"}),
        (5, {"INVALID_JSON": "5"}),
        ("no JSON", {"INVALID_JSON": "no JSON"}),
        ('{"a":' * 70 + "1" + "}" * 70, {"INVALID_JSON": '{"a":' * 70 + "1" + "}" * 70}),
    ],
    ids=lambda one: str(one)[:20],
)
def test_arguments_are_always_an_object(parse: Parse, arguments: object, kept: object) -> None:
    """Templates iterate over them."""
    given = {
        "messages": [*body(content="q")["messages"], {"role": "assistant", "tool_calls": [call(arguments=arguments)]}]
    }
    called = parse(given).request.messages[1].tool_calls[0]
    assert json.loads(called.arguments) == kept


def test_arguments_that_are_missing_are_none() -> None:
    given = {"messages": [*body(content="q")["messages"], {"role": "assistant", "tool_calls": [call()]}]}
    assert chat(given).request.messages[1].tool_calls == (ToolCall("call_1", "look", "{}"),)


# Names for the same thing


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm."},
        {"reasoning": None, "reasoning_content": "Hm."},
        {
            "reasoning_details": [
                {"type": "reasoning.text", "text": "H"},
                {"type": "reasoning.summary", "summary": "m."},
            ]
        },
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}], "reasoning": "Hm."},
    ],
)
def test_reasoning_has_several_names(fields: dict[str, Any]) -> None:  # Any: JSON
    given = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **fields}]
    assert chat({"messages": given}).request.messages[1] == Message("assistant", "a", reasoning="Hm.")


def test_older_calls_and_results() -> None:
    older = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}},
            {"role": "function", "name": "look", "content": "a river"},
        ]
    }
    newer = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [{"id": "call00001", "function": {"name": "look", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "call00001", "content": "a river"},
        ]
    }
    assert chat(older).request == chat(newer).request
    assert chat(older).ignored == ()


def test_a_custom_tools_call_is_a_call_of_one_text() -> None:
    calling = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "p", "input": "x\n"}}],
    }
    _, message = chat({"messages": [{"role": "user", "content": "q"}, calling]}).request.messages
    assert message.tool_calls == (ToolCall("c", "p", '{"input":"x\\n"}'),)


# Parts that are not text

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,Kanarienvogel"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "Kanarienvogel", "format": "wav"}}
FILE = {"type": "file", "file": {"file_data": "Kanarienvogel"}}
ODD = {"type": "Kanarien\r\nvogel", "text": "Kanarienvogel"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [call(arguments="{}")]}


def _parts(*parts: dict[str, Any]) -> list[dict[str, Any]]:  # Any: JSON
    return [{"type": "text", "text": "a"}, *parts]


@pytest.mark.parametrize(
    ("part", "shown", "named"),
    [
        (IMAGE, "[image omitted]", "image: placeholder"),
        (SOUND, "[audio omitted]", "audio: placeholder"),
        (FILE, "[file omitted]", "file: placeholder"),
        (ODD, "[part omitted]", "Kanarien??vogel: placeholder"),
    ],
    ids=["image", "audio", "file", "another"],
)
def test_a_part_of_a_tools_result_becomes_a_placeholder(part: dict[str, Any], shown: str, named: str) -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": _parts(part, {"type": "text", "text": "b"})}
    given = chat({"messages": [{"role": "user", "content": "q"}, CALLED, result]})
    assert given.request.messages[2].content == f"a\n{shown}\nb"
    assert given.ignored == (f"messages[2].content[1] ({named})",)


def test_a_part_of_an_earlier_turn_becomes_a_placeholder_and_one_of_an_answer_is_left_out() -> None:
    turns = [
        {"role": "user", "content": _parts(IMAGE)},
        {"role": "assistant", "content": [*_parts(IMAGE), {"type": "refusal", "refusal": " No."}]},
        {"role": "user", "content": "go on"},
    ]
    given = chat({"messages": turns})
    assert [one.content for one in given.request.messages] == ["a\n[image omitted]", "a No.", "go on"]
    assert given.ignored == ("messages[0].content[1] (image: placeholder)", "messages[1].content[1] (image)")


def test_a_part_behind_a_tools_result_is_the_tools() -> None:
    """Some clients put a tool's image into a user's message, because a result can be only text on some APIs."""
    result = {"role": "tool", "tool_call_id": "call_1", "content": "see below"}
    given = chat({"messages": [{"role": "user", "content": "q"}, CALLED, result, {"role": "user", "content": [IMAGE]}]})
    assert given.request.messages[3].content == "[image omitted]"


@both
@pytest.mark.parametrize("part", [IMAGE, SOUND, FILE, ODD], ids=["image", "audio", "file", "another"])
def test_a_part_of_what_the_user_asks_now_is_refused_by_name(parse: Parse, part: dict[str, Any]) -> None:
    answered = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    begun = {"role": "assistant", "content": "The image"}
    asked = {"role": "user", "content": _parts(part)}
    for before, behind in (
        ([], []),
        (answered, []),
        (answered, [{"role": "user", "content": "b"}]),
        (answered, [begun]),
    ):
        with pytest.raises(UnsupportedParameter) as caught:
            parse({"messages": [*before, asked, *behind]})
        assert caught.value.param == f"messages[{len(before)}].content[1]"
        assert "Kanarien" not in caught.value.message
