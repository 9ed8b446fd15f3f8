from __future__ import annotations

import json

import pytest

from tailrace.dialects import openai
from tailrace.dialects.wire import JsonBody
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.types import Message, Sampling

CHAT: JsonBody = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT: JsonBody = {"prompt": "Hi"}


def test_defaults_of_a_chat() -> None:
    call = openai.parse_chat(CHAT)
    assert call.request.sampling == Sampling()
    assert (call.request.prompt, call.request.messages) == (None, (Message("user", "Hi"),))
    assert (call.request.on_disconnect, call.stream, call.ignored) == ("cancel", False, ())


def test_defaults_of_a_completion() -> None:
    call = openai.parse_completion(TEXT)
    assert call.request.sampling == Sampling(max_tokens=16)
    assert (call.request.prompt, call.request.messages) == ("Hi", ())
    assert (call.request.on_disconnect, call.stream, call.ignored) == ("cancel", False, ())
    assert openai.parse_completion(TEXT | {"max_tokens": 5}).request.sampling.max_tokens == 5
    assert openai.parse_completion(TEXT | {"max_tokens": None}).request.sampling.max_tokens == 16


def test_a_developer_is_a_system_to_templates() -> None:
    body = {"messages": [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]}
    assert openai.parse_chat(body).request.messages == (Message("system", "a"), Message("user", "b"))


@pytest.mark.parametrize("body", [{}, {"messages": None}, {"messages": []}, {"messages": "Hi"}, {"prompt": "Hi"}])
def test_a_chat_needs_messages(body: JsonBody) -> None:
    with pytest.raises(RequestError, match="messages"):
        openai.parse_chat(body)


@pytest.mark.parametrize("prompt", [["a", "b"], [1, 2], [[1, 2]], []])
def test_prompts_that_are_not_one_text_are_refused_by_name(prompt: object) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        openai.parse_completion({"prompt": prompt})
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("body", [{}, {"prompt": None}, {"prompt": ""}, {"prompt": [""]}, {"prompt": 1}, CHAT])
def test_a_completion_needs_a_prompt(body: JsonBody) -> None:
    with pytest.raises(RequestError, match="prompt"):
        openai.parse_completion(body)


def test_a_list_of_one_prompt_is_that_prompt() -> None:
    assert openai.parse_completion({"prompt": ["Hi"]}) == openai.parse_completion(TEXT)


def test_logprobs() -> None:
    assert openai.parse_chat(CHAT | {"logprobs": True}).request.sampling.logprobs
    assert not openai.parse_chat(CHAT | {"logprobs": False}).request.sampling.logprobs
    assert openai.parse_completion(TEXT | {"logprobs": 0}).request.sampling.logprobs
    assert not openai.parse_completion(TEXT | {"logprobs": None}).request.sampling.logprobs
    with pytest.raises(UnsupportedParameter) as caught:
        openai.parse_completion(TEXT | {"logprobs": 1})
    assert caught.value.param == "logprobs"
    for wrong in (True, -1, 6):
        with pytest.raises(RequestError) as refused:
            openai.parse_completion(TEXT | {"logprobs": wrong})
        assert refused.value.param == "logprobs"


def test_usage_is_asked_for_with_a_stream_only() -> None:
    options = {"stream_options": {"include_usage": True}}
    with_usage = openai.parse_chat(CHAT | options | {"stream": True})
    assert with_usage.view != openai.parse_chat(CHAT | {"stream": True}).view
    for none in ({"include_usage": False}, {"include_usage": None}, {}, None):
        assert openai.parse_chat(CHAT | {"stream": True, "stream_options": none}).view == openai.parse_chat(CHAT).view
    for body in (CHAT | options, CHAT | options | {"stream": False}):
        with pytest.raises(RequestError) as caught:
            openai.parse_chat(body)
        assert caught.value.param == "stream_options"
    with pytest.raises(RequestError) as refused:
        openai.parse_completion(TEXT | {"stream": True, "stream_options": {"include_usage": 1}})
    assert refused.value.param == "stream_options.include_usage"


def test_unknown_fields_are_named_and_known_ones_are_not() -> None:
    everything = {
        "store": False,
        "metadata": {},
        "user": "me",
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
    }
    assert openai.parse_chat(CHAT | everything).ignored == ("metadata", "store")
    assert openai.parse_completion(TEXT | {"suffix": "", "echo": False, "x": 1}).ignored == ("x",)


def test_unknown_names_fit_into_a_header() -> None:
    names = {f"\r\n\u2028{i:03}" + "x" * 100: 1 for i in range(50)}
    ignored = openai.parse_chat(CHAT | names).ignored
    assert len(ignored) == 10
    assert all(name.isascii() and name.isprintable() and len(name) <= 40 for name in ignored)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("audio", {"voice": "alloy"}),
        ("best_of", 2),
        ("echo", True),
        ("function_call", "auto"),
        ("functions", [{}]),
        ("logit_bias", {"50256": -100}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content"}),
        ("response_format", {"type": "json_object"}),
        ("suffix", "end"),
        ("tool_choice", "required"),
        ("tools", [{"type": "function"}]),
        ("top_logprobs", 2),
        ("web_search_options", {}),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, wanted: object) -> None:
    for parse, body in ((openai.parse_chat, CHAT), (openai.parse_completion, TEXT)):
        with pytest.raises(UnsupportedParameter) as caught:
            parse(body | {name: wanted})
        assert caught.value.param == name
        assert parse(body | {name: None}) == parse(body)


def test_models() -> None:
    assert json.loads(openai.encode_models(["a\u00df"], 5)) == {
        "object": "list",
        "data": [{"id": "a\u00df", "object": "model", "created": 5, "owned_by": "tailrace"}],
    }
    assert openai.encode_models(["\u2028"], 5).isascii()
