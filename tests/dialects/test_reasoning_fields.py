"""The fields about reasoning on each wire, and the values that the chat template gets."""

from __future__ import annotations

from typing import Any

import pytest
from tests.dialects.fake_server import FakeServer, chat, native, parsed, tutorial

from tailrace.conversations.items import Item, messages_of
from tailrace.conversations.turns import Spoken, read_turn
from tailrace.dialects import GenerateCall, openai
from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.openai_chunks import ChatView
from tailrace.dialects.shapes import read_fields
from tailrace.errors import RequestError
from tailrace.types import Message
from tailrace_outer.responses import responses_wire
from tailrace_outer.responses.responses_items import items_from
from tailrace_plugins.anthropic import anthropic_wire as anthropic
from tailrace_plugins.articles import cumulative
from tailrace_plugins.ollama import ollama_wire as ollama
from tailrace_plugins.triton import triton_wire as triton

HI = {"role": "user", "content": "Hi"}
UNABLE = FakeServer(splits_reasoning=False, takes_reasoning=False, template_values=frozenset())
FIXED = FakeServer(template_values=frozenset())  # it thinks, whatever it is told


def _anthropic(more: JsonBody, server: FakeServer | None = None) -> GenerateCall:
    return anthropic.parse(parsed({"model": "m", "max_tokens": 2000, "messages": [HI], **more}, server=server))


def _ollama(more: JsonBody, server: FakeServer | None = None) -> GenerateCall:
    call = ollama.parse_chat(parsed({"model": "m", "messages": [HI], **more}, server=server))
    assert isinstance(call, GenerateCall)
    return call


def _response(more: JsonBody, server: FakeServer | None = None) -> GenerateCall:
    return responses_wire.parse(parsed({"input": "Hi", **more}, server=server))


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (native({"messages": [HI]}), {}),
        (native({"messages": [HI], "chat_template_kwargs": {"enable_thinking": False}}), {"enable_thinking": False}),
        (chat({"messages": [HI], "reasoning_effort": "low"}), {"reasoning_effort": "low"}),
        (
            chat({"messages": [HI], "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}),
            {"reasoning_effort": "high"},
        ),
        (_response({"reasoning": {"effort": "high"}}), {"reasoning_effort": "high"}),
        (_anthropic({}), {"enable_thinking": False}),
        (_anthropic({"thinking": {"type": "disabled"}}), {"enable_thinking": False}),
        (_anthropic({"thinking": {"type": "adaptive"}}), {}),
        (_anthropic({"thinking": {"type": "enabled", "budget_tokens": 1024}}), {"enable_thinking": True}),
        (_anthropic({}, FakeServer(template_values=frozenset({"thinking"}))), {"thinking": False}),
        (_anthropic({}, UNABLE), {}),
        (_ollama({}), {}),
        (_ollama({"think": True}), {"enable_thinking": True}),
        (_ollama({"think": False}), {"enable_thinking": False}),
        (_ollama({"think": "high"}), {"reasoning_effort": "high"}),
        (_ollama({"think": True}, FIXED), {}),
        (_ollama({"think": False}, UNABLE), {}),
    ],
)
def test_values_for_the_template(call: GenerateCall, values: dict[str, object]) -> None:
    assert call.request.template_values == values


@pytest.mark.parametrize(
    ("call", "ignored"),
    [
        (openai.parse_chat(parsed({"messages": [HI], "reasoning_effort": "low"}, server=FIXED)), "reasoning_effort"),
        (openai.parse_chat(parsed({"messages": [HI], "reasoning_effort": "none"}, server=FIXED)), "reasoning_effort"),
        (_response({"reasoning": {"effort": "low"}}, FIXED), "reasoning.effort"),
        (_response({"reasoning": {"summary": "auto"}}), "reasoning.summary"),
        (_response({"include": ["reasoning.encrypted_content"]}), "include.reasoning.encrypted_content"),
    ],
)
def test_fields_without_effect_are_named(call: GenerateCall, ignored: str) -> None:
    assert call.ignored == (ignored,)


_SAID: list[tuple[str, Any, Any]] = [  # Any: parsers and bodies of several kinds
    ("messages[].reasoning_content", openai.parse_chat,
     {"messages": [HI, {"role": "assistant", "content": "Ho", "reasoning_content": "Hm"}, HI]}),
    ("messages[].thinking", ollama.parse_chat,
     {"model": "m", "messages": [HI, {"role": "assistant", "content": "Ho", "thinking": "Hm"}, HI]}),
    ("messages[].content[].thinking", anthropic.parse,
     {"model": "m", "max_tokens": 9, "messages": [HI, {"role": "assistant", "content": [
         {"type": "thinking", "thinking": "Hm", "signature": "s"}, {"type": "text", "text": "Ho"}]}, HI]}),
    ("input[].reasoning", responses_wire.parse,
     {"input": [HI, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
                {"role": "assistant", "content": "Ho"}, HI]}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "parse", "body"), _SAID, ids=[name for name, _, _ in _SAID])
def test_earlier_reasoning_is_sent_back(name: str, parse: Any, body: JsonBody) -> None:  # Any: of several wires
    call = parse(parsed(body))
    assert call.request.messages[1] == Message("assistant", "Ho", reasoning="Hm")
    assert call.ignored == ()
    assert parse(parsed(body, server=UNABLE)).ignored == (name,)


def test_a_beginning_is_continued_with_any_template() -> None:
    begun = {"role": "assistant", "content": None, "reasoning_content": "Hm"}
    call = openai.parse_chat(parsed({"messages": [HI, begun]}, server=FakeServer(takes_reasoning=False)))
    assert call.request.continue_final
    assert call.ignored == ()
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm", "signature": ""}]}
    assert _anthropic({"messages": [HI, thought]}).request.messages[-1] == Message("assistant", "", reasoning="Hm")


@pytest.mark.parametrize(
    "call",
    [
        tutorial({"prompt": "Hi"}),
        cumulative.parse(parsed({"prompt": "Hi"})),
        triton.parse_stream(parsed({"text_input": "Hi"}, path={"model": "scripted"})),
        native({"messages": [HI], "reasoning": "text"}),
        chat({"messages": [HI], "reasoning_format": "none"}),
    ],
)
def test_wires_that_leave_it_in_the_text(call: GenerateCall) -> None:
    assert not call.request.split_reasoning


@pytest.mark.parametrize(
    "body",
    [
        {"thinking": {"type": "enabled", "budget_tokens": "all"}},
        {"thinking": {"type": "between_tools"}},
        {"thinking": "yes"},
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a", "signature": ""}]}]},
        {"messages": [HI, {"role": "assistant", "content": [{"type": "thinking"}]}]},
    ],
)
def test_what_anthropic_would_refuse(body: JsonBody) -> None:
    with pytest.raises(RequestError) as refused:
        _anthropic(body)
    assert (refused.value.param or "").startswith(next(iter(body)))


@pytest.mark.parametrize("think", ["very", 1, "", []])
def test_what_ollama_would_refuse(think: object) -> None:
    with pytest.raises(RequestError):
        _ollama({"think": think})


def test_thinking_of_a_model_without_it_is_ignored_and_named() -> None:
    assert _ollama({"think": True}, UNABLE).ignored == ("think",)
    assert _ollama({"think": "low"}, FIXED).ignored == ("think (has no levels)",)
    assert _anthropic({"thinking": {"type": "enabled", "budget_tokens": 1024}}, UNABLE).ignored == ("thinking",)


def _chat(more: JsonBody, server: FakeServer | None = None) -> GenerateCall:
    return openai.parse_chat(parsed({"messages": [HI], **more}, server=server))


@pytest.mark.parametrize(
    ("call", "most"),
    [
        (native({"messages": [HI], "max_reasoning_tokens": 64}), 64),
        (native({"messages": [HI], "max_reasoning_tokens": -1}), None),
        (_chat({"thinking_budget_tokens": 64}), 64),
        (_chat({"thinking_token_budget": 0}), 0),
        (_chat({"thinking_budget": 64, "reasoning": {"max_tokens": 32}}), 32),
        (_chat({"thinking_budget": -1}), None),
        (_chat({}), None),
        (_response({"reasoning": {"max_tokens": 64}}), 64),
        (_anthropic({"thinking": {"type": "enabled", "budget_tokens": 1024}}), 1024),
        (_anthropic({"thinking": {"type": "adaptive"}}), None),
    ],
)
def test_the_budget_for_reasoning(call: GenerateCall, most: int | None) -> None:
    assert (call.request.sampling.max_reasoning_tokens, call.ignored) == (most, ())


@pytest.mark.parametrize(
    ("call", "ignored"),
    [
        (
            _chat({"reasoning": {"max_tokens": 9}, "thinking_budget": 8}, UNABLE),
            ("reasoning.max_tokens", "thinking_budget"),
        ),
        (_response({"reasoning": {"max_tokens": 9}}, UNABLE), ("reasoning.max_tokens",)),
    ],
)
def test_a_budget_for_a_model_that_does_not_reason_is_named(call: GenerateCall, ignored: tuple[str, ...]) -> None:
    assert (call.request.sampling.max_reasoning_tokens, call.ignored) == (None, ignored)


def test_openrouters_form() -> None:
    call = _chat({"reasoning": {"effort": "high", "exclude": True}})
    assert (call.request.template_values, call.ignored) == ({"reasoning_effort": "high"}, ())
    assert isinstance(call.view, ChatView)
    assert not call.view.shows_reasoning
    assert _chat({"reasoning": {"enabled": False}}).request.template_values == {"enable_thinking": False}
    assert _chat({"reasoning": {"enabled": False}}, FIXED).ignored == ("reasoning.enabled",)
    assert _chat({"reasoning": {"enabled": False}}, UNABLE).ignored == ()
    assert _chat({"reasoning": {"effort": "low"}}, FIXED).ignored == ("reasoning.effort",)


# In conversations


def _thought(text: str) -> JsonBody:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def _items(given: list[JsonBody]) -> tuple[Item, ...]:
    fields, unknown = read_fields({"input": given}, responses_wire.ResponsesBody)
    notes = list(unknown)
    items = items_from(fields.input, notes)
    assert not notes
    return items


def test_reasoning_items_belong_to_what_follows() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    items = _items([HI, _thought("a"), {"role": "assistant", "content": "Ho"}, _thought("b"), call])
    assert [(item.kind, item.role, item.reasoning) for item in items] == [
        ("message", "user", ""), ("message", "assistant", "a"), ("function_call", "", "b"),
    ]  # fmt: skip
    assert messages_of(items)[1].reasoning == "a"
    assert messages_of(items[2:])[0].reasoning == "b"


@pytest.mark.parametrize("behind", [[], [HI]])
def test_an_answer_that_ended_in_its_reasoning_has_no_text(behind: list[JsonBody]) -> None:
    items = _items([HI, _thought("a"), *behind])
    assert items[1] == Item(role="assistant", reasoning="a")
    assert len(items) == 2 + len(behind)


def test_a_chat_continues_inside_reasoning() -> None:
    items = (Item(item_id="a", role="user", text="Hi"), Item(item_id="b", role="assistant", reasoning="Hm"))
    call = openai.parse_chat(parsed({"conversation": "conv_1", "messages": []}, items=items))
    assert call.request.messages[-1] == Message("assistant", "", reasoning="Hm")
    assert call.request.continue_final
    turn = read_turn(call.request.turn)
    (answer,) = turn.answer("s", Spoken("So", "completed", " yes"), "a", 0.0)
    assert (answer.text, answer.reasoning) == ("So", "Hm yes")


def test_an_answer_of_calls_alone_has_its_reasoning() -> None:
    call = openai.parse_chat(parsed({"conversation": "conv_1", "messages": [HI], "tools": [
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]}))  # fmt: skip
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    (item,) = read_turn(call.request.turn).answer("s", Spoken(text, "completed", "Hm"), None, 0.0)
    assert (item.kind, item.reasoning) == ("function_call", "Hm")
