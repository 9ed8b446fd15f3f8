"""Tools of all kinds: which ones the model sees, under which names, and how its calls come back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.dialects.fake_server import FakeServer, chat, parsed
from tests.dialects.sse import parse as parse_sse
from tests.dialects.transcripts import facts

from tailrace.dialects import GenerateCall, openai
from tailrace.dialects.bodies import JsonBody
from tailrace.errors import RequestError
from tailrace.text.custom_calls import CustomCallReader
from tailrace.types import End, Event, TextDelta, Usage
from tailrace_outer.responses import responses_wire
from tailrace_plugins.anthropic import anthropic_wire as anthropic
from tailrace_plugins.ollama import ollama_wire as ollama

CHAT: JsonBody = {"messages": [{"role": "user", "content": "Hi"}]}
LOOK: JsonBody = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
PATCH: JsonBody = {"type": "custom", "custom": {"name": "patch", "description": "d"}}
INPUT: JsonBody = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
                   "additionalProperties": False}  # fmt: skip
Ask = Callable[[list[str]], GenerateCall]


def names_of(call: GenerateCall) -> list[str]:
    return [tool["function"]["name"] for tool in call.request.tools]


def _function(name: str) -> JsonBody:
    return {"type": "function", "function": {"name": name}}


def _chat(names: list[str]) -> GenerateCall:
    return chat(CHAT | {"tools": [_function(name) for name in names]})


def _older_chat(names: list[str]) -> GenerateCall:
    return chat(CHAT | {"functions": [{"name": name} for name in names]})


def _response(names: list[str]) -> GenerateCall:
    return responses_wire.parse(
        parsed({"input": "Hi", "tools": [{"type": "function", "name": name} for name in names]})
    )


def _messages(names: list[str]) -> GenerateCall:
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in names]
    return anthropic.parse(parsed({"model": "m", "max_tokens": 9, **CHAT, "tools": tools}))


def _ollama(names: list[str]) -> GenerateCall:
    call = ollama.parse_chat(parsed({"model": "m", **CHAT, "tools": [_function(name) for name in names]}))
    assert isinstance(call, GenerateCall)
    return call


ASK: dict[str, Ask] = {"chat": _chat, "older chat": _older_chat, "responses": _response, "anthropic": _messages,
                       "ollama": _ollama}  # fmt: skip
every = pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
strict = pytest.mark.parametrize("ask", [ask for name, ask in ASK.items() if name != "ollama"])


@every
@pytest.mark.parametrize("name", ["catalog.get-entity", "files/read", "ns:tool", "a" * 128, "_x"])
def test_names_may_be_those_of_mcp(ask: Ask, name: str) -> None:
    assert names_of(ask([name])) == [name]


@strict
@pytest.mark.parametrize("name", ["", "a b", "a\n", "Kanarien\u00fcvogel", "<|im_end|>", "a" * 129])
def test_another_name_is_an_error_that_has_the_position_of_the_tool(ask: Ask, name: str) -> None:
    with pytest.raises(RequestError, match=r"letters, digits") as caught:
        ask(["look", name])
    assert str(caught.value.param).endswith("[1]")
    assert "Kanarien" not in caught.value.message


def test_ollama_has_tools_of_any_printable_name() -> None:
    assert names_of(_ollama(["Kanarien\u00fcvogel 1", "<|im_end|>"])) == ["Kanarien\u00fcvogel 1", "<|im_end|>"]
    for name in ("", "a\nb", "a\0", "\u2028", "x" * 257):
        with pytest.raises(RequestError, match="printable"):
            _ollama([name])


@every
def test_there_may_be_many_tools(ask: Ask) -> None:
    assert len(names_of(ask([f"t{number}" for number in range(1_024)]))) == 1_024
    with pytest.raises(RequestError, match="1024"):
        ask([f"t{number}" for number in range(1_025)])


def test_ignored_tools_are_not_checked() -> None:
    tools = [_function("a b"), _function("a b")] + [_function(f"t{number}") for number in range(2_000)]
    given = {"tools": [*tools, {"type": "web_search"}]}
    call = openai.parse_chat(parsed(CHAT | given, server=FakeServer(tool_format="")))
    assert (call.request.tools, call.ignored) == ((), ("tools",))
    assert chat(CHAT | given | {"tool_choice": "none"}).request.tools == ()


def test_tools_are_shown_where_the_format_of_calls_is_not_known() -> None:
    server = FakeServer(tool_format="", describes_tools=True)
    call = openai.parse_chat(parsed(CHAT | {"tools": [LOOK]}, server=server))
    assert (names_of(call), call.ignored) == (["look"], ("tools (how this model writes calls is not known)",))
    assert call.request.calls is not None
    assert call.request.calls.format == "any"


@every
def test_the_type_of_a_tool_comes_before_its_function(ask: Ask) -> None:
    assert json.dumps(ask(["look"]).request.tools[0]).startswith('{"type": "function", "function": {"name": "look"')


@every
def test_the_same_tool_twice_counts_once(ask: Ask) -> None:
    call = ask(["look", "look"])
    assert names_of(call) == ["look"]
    assert [entry.partition("[")[2] for entry in call.ignored] in (["1] (the same as tools[0])"],
                                                                   ["1] (the same as functions[0])"])  # fmt: skip


def test_tools_of_other_kinds_are_left_out_and_named() -> None:
    tools = [{"type": "web_search"}, LOOK, {"type": "Kanarien\r\nvogel"}, {"function": {"name": "wait"}}]
    call = chat(CHAT | {"tools": tools})
    assert (names_of(call), call.ignored) == (["look", "wait"], ("tools[0] (web_search)", "tools[2] (Kanarien??vogel)"))


def _allowed(mode: str, *names: str) -> JsonBody:
    tools = [_function(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("choice", "shown", "callable_names"),
    [
        (_allowed("auto", "look"), ["look"], None),
        (_allowed("required", "look"), ["look", "wait"], ["look"]),
        ("look", ["look", "wait"], ["look"]),  # TGI's form
        ("any", ["look", "wait"], ["look", "wait"]),
        ({"function": {"name": "wait"}}, ["look", "wait"], ["wait"]),
        ({"type": "custom", "custom": {"name": "wait"}}, ["look", "wait"], ["wait"]),
    ],
    ids=str,
)  # fmt: skip
def test_choices(choice: object, shown: list[str], callable_names: list[str] | None) -> None:
    call = chat(CHAT | {"tools": [LOOK, _function("wait")], "tool_choice": choice})
    assert names_of(call) == shown
    grammar = call.request.sampling.grammar
    forced = [name for name in ("look", "wait") if grammar is not None and f'"name":"{name}"' in grammar.source]
    assert (forced or None) == callable_names


def test_the_choices_of_responses() -> None:
    tools = [{"type": "function", "name": "look"}, {"type": "function", "name": "wait"}]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "wait"}]}
    assert names_of(responses_wire.parse(parsed({"input": "Hi", "tools": tools, "tool_choice": allowed}))) == ["wait"]
    named = responses_wire.parse(
        parsed({"input": "Hi", "tools": tools, "tool_choice": "look"})
    ).request.sampling.grammar
    assert named is not None
    assert '"wait"' not in named.source


# Custom tools, whose call is a text


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    call = chat(CHAT | {"tools": [PATCH, LOOK]})
    assert call.request.tools[0] == {
        "type": "function",
        "function": {"name": "patch", "description": "d", "parameters": INPUT},
    }
    assert call.ignored == ()


@pytest.mark.parametrize("inner", [False, True])
def test_the_grammar_of_a_custom_tool_is_shown_to_the_model_and_named(inner: bool) -> None:
    grammar = {"syntax": "lark", "definition": "start: /a/"}
    form = {"type": "grammar", "grammar": grammar} if inner else {"type": "grammar", **grammar}
    call = chat(CHAT | {"tools": [{"type": "custom", "custom": {"name": "patch", "format": form}}]})
    text = call.request.tools[0]["function"]["parameters"]["properties"]["input"]
    assert text == {"type": "string", "description": "A text of this grammar (lark):\nstart: /a/"}
    assert call.ignored == ("tools[0].format (shown to the model)",)


TEXT = 'say "hi" \\ \U0001f30a\n'
CALLED = f'<tool_call>{{"name": "patch", "arguments": {json.dumps({"input": TEXT})}}}</tool_call>'
PLAIN = '<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>'


def _events(text: str, step: int) -> list[Event]:
    deltas: list[Event] = [TextDelta(text[at : at + step], (65,)) for at in range(0, len(text), step)]
    return [*deltas, TextDelta("", (66,), finish_reason="stop"), End("done", Usage(1, 9))]


def _streamed(body: JsonBody, events: list[Event]) -> list[Any]:  # Any: JSON
    encoder = chat(body | {"stream": True}).view.open(facts())
    stream = b"".join(encoder.encode(seq, event) for seq, event in enumerate(events, 1))
    return [json.loads(event.text)["choices"][0] for event in parse_sse(stream) if event.text != "[DONE]"]


@pytest.mark.parametrize("step", [1, 3, 7, 1_000])
def test_the_call_of_a_custom_tool_comes_back_as_its_text(step: int) -> None:
    body, events = CHAT | {"tools": [PATCH, LOOK]}, _events(CALLED + PLAIN, step)
    message = json.loads(chat(body).view.open(facts()).whole(events))["choices"][0]["message"]
    ours, theirs = message["tool_calls"]
    assert (ours["type"], ours["custom"]) == ("custom", {"name": "patch", "input": TEXT})
    assert (theirs["type"], theirs["function"]) == ("function", {"name": "look", "arguments": '{"a": 1}'})
    parts = [one for choice in _streamed(body, events) for one in choice["delta"].get("tool_calls", ())]
    first = [part for part in parts if part["index"] == 0]
    assert (first[0]["id"], first[0]["type"], first[0]["custom"]) == (
        ours["id"],
        "custom",
        {"name": "patch", "input": ""},
    )
    assert "".join(part["custom"]["input"] for part in first) == TEXT


def test_the_call_of_an_older_function_is_the_messages_own() -> None:
    body, events = CHAT | {"functions": [{"name": "look"}], "function_call": "auto"}, _events(PLAIN, 5)
    choice = json.loads(chat(body).view.open(facts()).whole(events))["choices"][0]
    assert choice["message"]["function_call"] == {"name": "look", "arguments": '{"a": 1}'}
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "function_call"
    choices = _streamed(body, events)
    parts = [one["delta"]["function_call"] for one in choices if "function_call" in one["delta"]]
    assert parts[0] == {"name": "look", "arguments": ""}
    assert "".join(part["arguments"] for part in parts) == '{"a": 1}'
    assert choices[-1]["finish_reason"] == "function_call"
    for choice_of_one in ({"name": "look"}, "none"):
        grammar = chat(body | {"function_call": choice_of_one}).request.sampling.grammar
        assert (grammar is not None) == (choice_of_one != "none")


def _read(pieces: list[str]) -> str:
    reader = CustomCallReader()
    return "".join(reader.push(piece) for piece in pieces) + reader.flush()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": ""}', ""),
        (json.dumps({"input": TEXT}), TEXT),
        (json.dumps({"input": TEXT}, ensure_ascii=False), TEXT),
        (' {\n"input" :"a\\u00e9\\ud83c\\udf0a\\b\\f\\/"} ', "a\u00e9\U0001f30a\b\f/"),
        ('{"input": "a", "more": 1}', "a"),
        ('{"more": 1, "input": "a"}', "a"),  # in another order it comes at the end
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\u00', "cut"),
        ('{"input": "half \\ud83c of a pair"}', "half \ufffd of a pair"),
        ('{"input": "\\uXY"}', "uXY"),
        ('{"input": "a\nb"}', "a\nb"),  # a line end as it is, which JSON does not allow
        ('{"input": 5}', '{"input": 5}'),
        ("no JSON", "no JSON"),
        ('{"' + "x" * 100, '{"' + "x" * 100),
        ("", ""),
    ],
    ids=str,
)
def test_the_text_does_not_depend_on_how_the_arguments_are_cut(arguments: str, text: str) -> None:
    assert _read([arguments]) == text
    assert _read(list(arguments)) == text
    for at in range(len(arguments)):
        assert _read([arguments[:at], arguments[at:]]) == text
