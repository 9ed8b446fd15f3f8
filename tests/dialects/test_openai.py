"""OpenAI's requests. `test_openai_answers.py` tests the answers."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
from tests.dialects.fake_server import FakeServer, chat, completion, parsed
from tests.dialects.transcripts import facts

from tailrace.dialects import openai
from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.openai_chunks import ChatView
from tailrace.dialects.openai_models import list_models, show_model
from tailrace.dialects.wire import GenerateCall, View
from tailrace.errors import RequestError, UnknownModel, UnsupportedParameter
from tailrace.types import (
    NO_LIMIT,
    CallReading,
    End,
    Event,
    Grammar,
    Message,
    Sampling,
    TextDelta,
    Usage,
)

CHAT: JsonBody = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT: JsonBody = {"prompt": "Hi"}
LOOK: JsonBody = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
WAIT: JsonBody = {"type": "function", "function": {"name": "wait", "description": "Do nothing."}}


def test_defaults_of_a_chat() -> None:
    call = chat(CHAT)
    assert call.request.sampling == Sampling()
    assert (call.request.prompts, call.request.messages) == ((), (Message("user", "Hi"),))
    assert (call.request.tools, call.request.continue_final) == ((), False)
    assert (call.request.on_disconnect, call.stream, call.ignored) == ("cancel", False, ())


def test_defaults_are_those_that_the_model_recommends() -> None:
    server = FakeServer(recommended_sampling={"temperature": 0.6, "top_k": 20})
    assert chat(CHAT, server=server).request.sampling == Sampling(temperature=0.6, top_k=20)
    assert chat(CHAT | {"temperature": 1}, server=server).request.sampling == Sampling(top_k=20)
    assert chat(CHAT | {"temperature": 0}, server=server).request.sampling == Sampling(temperature=0.0)
    assert chat(CHAT | {"top_p": 0}, server=server).request.sampling == Sampling(temperature=0.0)


def test_defaults_of_a_completion() -> None:
    call = completion(TEXT)
    assert call.request.sampling == Sampling(max_tokens=16)
    assert (call.request.prompts, call.request.messages) == (("Hi",), ())
    assert (call.request.on_disconnect, call.stream, call.ignored) == ("cancel", False, ())
    assert completion(TEXT | {"max_tokens": 5}).request.sampling.max_tokens == 5
    assert completion(TEXT | {"max_tokens": None}).request.sampling.max_tokens == 16


@pytest.mark.parametrize(("parse", "body"), [(chat, CHAT), (completion, {"prompt": "Hi"})])
def test_parameters_about_tokens(parse: Callable[[JsonBody], GenerateCall], body: JsonBody) -> None:
    given = {"min_tokens": 3, "stop_token_ids": [5], "allowed_token_ids": [5, 6], "bad_words": ["a", " b"]}
    request = parse(body | given | {"skip_special_tokens": False}).request
    sampling = request.sampling
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.allowed_token_ids) == (3, (5,), (5, 6))
    assert (sampling.include_special, request.bad_words) == (True, ("a", " b"))
    neutral = {"min_tokens": 0, "stop_token_ids": [], "bad_words": [], "skip_special_tokens": True}
    assert parse(body | neutral) == parse(body)
    for name, value in {"min_tokens": -1, "stop_token_ids": [-1], "allowed_token_ids": "5", "bad_words": [" "]}.items():
        with pytest.raises(RequestError) as caught:
            parse(body | {name: value})
        assert str(caught.value.param).partition("[")[0] == name


def test_templates_see_a_developer_as_system() -> None:
    body = {"messages": [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]}
    assert chat(body).request.messages == (Message("system", "a"), Message("user", "b"))


@pytest.mark.parametrize("body", [{}, {"messages": None}, {"messages": []}, {"messages": "Hi"}, {"prompt": "Hi"}])
def test_a_chat_needs_messages(body: JsonBody) -> None:
    with pytest.raises(RequestError, match="messages"):
        chat(body)


# Prompts


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ("Hi",)),
        (["Hi"], ("Hi",)),
        (["a", "b", "a"], ("a", "b", "a")),
        ([1, 2], (((1, 2),),)),
        ([0], (((0,),),)),
        ([[1, 2], [3]], (((1, 2),), ((3,),))),
        (["a", [1]], ("a", ((1,),))),
    ],
)
def test_prompts_in_every_form(prompt: object, prompts: tuple[object, ...]) -> None:
    assert completion({"prompt": prompt}).request.prompts == prompts


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [""], ["a", ""], [[]], [[1], []], 1, True, {}, [None], [True], [1.5], [[1.5]], [["a"]], [1, "a"],
     ["a", 1], [[1], 1], [[[1]]], {"text": "Hi"}],
)  # fmt: skip
def test_invalid_prompts(prompt: object) -> None:
    with pytest.raises(RequestError) as caught:
        completion({"prompt": prompt})
    assert str(caught.value.param).partition("[")[0] == "prompt"


def test_a_completion_needs_a_prompt() -> None:
    for body in ({}, CHAT):
        with pytest.raises(RequestError, match="prompt"):
            completion(body)


def test_an_assistants_message_at_the_end_is_continued() -> None:
    before: list[object] = [{"role": "user", "content": "Count."}]
    begun = {"role": "assistant", "content": "One,"}
    assert chat({"messages": [*before, begun]}).request.continue_final
    assert not chat({"messages": [*before, begun, *before]}).request.continue_final
    called = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "look"}}]}
    assert not chat({"messages": [*before, called]}).request.continue_final


# Sampling


def test_logprobs() -> None:
    assert chat(CHAT | {"logprobs": True}).request.sampling == Sampling(logprobs=True)
    assert chat(CHAT | {"logprobs": True, "top_logprobs": 20}).request.sampling.top_logprobs == 20
    assert not chat(CHAT | {"logprobs": False, "top_logprobs": 3}).request.sampling.top_logprobs
    assert chat(CHAT | {"top_logprobs": 3}).request.sampling == Sampling(logprobs=True, top_logprobs=3)
    assert completion(TEXT | {"logprobs": 0}).request.sampling == Sampling(max_tokens=16, logprobs=True)
    assert completion(TEXT | {"logprobs": 5}).request.sampling.top_logprobs == 5
    assert not completion(TEXT | {"logprobs": None}).request.sampling.logprobs


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (TEXT | {"logprobs": True}, "logprobs"),
        (TEXT | {"logprobs": -1}, "logprobs"),
        (TEXT | {"logprobs": 6}, "logprobs"),
        (CHAT | {"logprobs": 1}, "logprobs"),
        (CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT | {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_logprobs_that_cannot_be(body: JsonBody, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        (chat if "messages" in body else completion)(body)
    assert caught.value.param == param


def test_an_engine_may_have_only_the_logprobs_of_the_chosen_tokens() -> None:
    server = FakeServer(parameters=frozenset(("logprobs", "temperature")))
    assert openai.parse_completion(parsed(TEXT | {"logprobs": 0}, server=server)).request.sampling.logprobs
    with pytest.raises(UnsupportedParameter, match="logprobs can be 0") as caught:
        openai.parse_completion(parsed(TEXT | {"logprobs": 2}, server=server))
    assert caught.value.param == "logprobs"


def test_a_prompt_for_tools_of_tgis_client_is_named() -> None:
    call = chat(CHAT | {"tool_prompt": "Use a tool."})
    assert (call.request, call.ignored) == (chat(CHAT).request, ("tool_prompt",))


def test_biases() -> None:
    biases = {"50256": -100, "0": 0.5, "7": 100}
    for parse, body in ((chat, CHAT), (completion, TEXT)):
        assert parse(body | {"logit_bias": biases}).request.sampling.logit_bias == ((50256, -100), (0, 0.5), (7, 100))
        assert parse(body | {"logit_bias": {}}) == parse(body)
        pairs = [[7, 1.5], [3, -2], [9, False]]  # llama.cpp's form
        assert parse(body | {"logit_bias": pairs}).request.sampling.logit_bias == ((7, 1.5), (3, -2), (9, -100))
        assert parse(body | {"logit_bias": []}) == parse(body)


@pytest.mark.parametrize(
    "biases",
    [
        {"a": 1},
        {"-1": 1},
        {"": 1},
        {" 1": 1},
        {"1.0": 1},
        {"\u0661": 1},
        {"9" * 10: 1},
        {"1": 100.1},
        {"1": -101},
        {"1": "1"},
        {"1": None},
        {str(i): 1 for i in range(301)},
        [1],
        [["a", 1]],
        [[1, 101]],
        [[1, True]],
        [[1]],
        [[1, 1, 1]],
        [[1, 1]] * 301,
        "1",
    ],
)
def test_biases_that_are_none(biases: object) -> None:
    with pytest.raises(RequestError) as caught:
        chat(CHAT | {"logit_bias": biases})
    assert str(caught.value.param).partition("[")[0] == "logit_bias"


def test_fields_of_vllm() -> None:
    for parse, body in ((chat, CHAT), (completion, TEXT)):
        assert parse(body | {"include_stop_str_in_output": True, "stop": "a"}).request.sampling.include_stop
        assert parse(body | {"truncate_prompt_tokens": 5}).request.truncate == 5
        for wrong in (0, -1, "5", 2**31):
            with pytest.raises(RequestError):
                parse(body | {"truncate_prompt_tokens": wrong})


# What the answer must look like

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "value": SCHEMA},
        {"type": "json", "value": SCHEMA},
        {"type": "json_object", "value": SCHEMA},
    ],
)
def test_a_schema_in_every_form(response_format: object) -> None:
    grammar = chat(CHAT | {"response_format": response_format}).request.sampling.grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.source)) == ("json_schema", SCHEMA)


@pytest.mark.parametrize(
    ("response_format", "grammar"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar("json_schema", '{"type":"object"}')),
        ({"type": "json_object", "value": None}, Grammar("json_schema", '{"type":"object"}')),
        ({"type": "regex", "value": "[0-9]{1,3}"}, Grammar("regex", "[0-9]{1,3}")),
    ],
)
def test_formats(response_format: object, grammar: Grammar | None) -> None:
    assert chat(CHAT | {"response_format": response_format}).request.sampling.grammar == grammar


@pytest.mark.parametrize(
    "response_format",
    [{}, {"type": "xml"}, {"type": 1}, {"type": ["text"]}, "text", [], {"type": "json_schema"},
     {"type": "json_schema", "json_schema": {}}, {"type": "json_schema", "json_schema": {"schema": True}},
     {"type": "json_schema", "json_schema": SCHEMA}, {"type": "json", "value": "a"}, {"type": "regex"}],
)  # fmt: skip
def test_formats_that_are_none(response_format: object) -> None:
    with pytest.raises(RequestError) as caught:
        chat(CHAT | {"response_format": response_format})
    assert caught.value.param == "response_format"


# Tools


def tools_of(choice: object = None, *tools: JsonBody) -> tuple[tuple[str, ...], Grammar | None, ChatView]:
    body = CHAT | {"tools": list(tools or (LOOK, WAIT))} | ({} if choice is None else {"tool_choice": choice})
    call = chat(body)
    assert isinstance(call.view, ChatView)
    return tuple(tool["function"]["name"] for tool in call.request.tools), call.request.sampling.grammar, call.view


def test_absent_fields_of_tools_are_not_shown_to_the_template() -> None:
    assert chat(CHAT | {"tools": [LOOK, WAIT]}).request.tools == (LOOK, WAIT)
    bare = {"function": {"name": "look"}}
    assert chat(CHAT | {"tools": [bare]}).request.tools == ({"type": "function", **bare},)


@pytest.mark.parametrize("choice", [None, "auto"])
def test_the_model_may_call(choice: str | None) -> None:
    names, grammar, view = tools_of(choice)
    assert (names, grammar) == (("look", "wait"), None)
    assert view.calls == CallReading(tools={"look": {"at": True}, "wait": {}})


TWO_CALLS = [
    "So: ",
    '<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>',
    '<tool_call>{"name": "wait", "arguments": {}}</tool_call> Done.',
]


@pytest.mark.parametrize(("parallel", "names"), [(None, 2), (True, 2), (False, 1)])
def test_parallel_calls_can_be_disabled(parallel: bool | None, names: int) -> None:
    call = chat(CHAT | {"tools": [LOOK, WAIT], "parallel_tool_calls": parallel, "stream": True})
    assert call.ignored == ()
    deltas = [TextDelta(text, (65,)) for text in TWO_CALLS]
    deltas[-1] = msgspec.structs.replace(deltas[-1], finish_reason="stop")
    events: list[Event] = [*deltas, End("done", Usage(1, 3))]
    choice = json.loads(call.view.open(facts()).whole(events))["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert [one["function"]["name"] for one in calls] == ["look", "wait"][:names]
    assert choice["message"]["content"] == ("So: " if names == 1 else "So:  Done.")
    assert choice["finish_reason"] == "tool_calls"
    encoder = call.view.open(facts())
    streamed = b"".join(encoder.encode(n, event) for n, event in enumerate(events, 1))
    assert streamed.count(b'"type":"function"') == names
    assert (b"Done." in streamed) == (names == 2)
    assert call.request.sampling.single_call is (names == 1)
    forced = chat(CHAT | {"tools": [LOOK], "parallel_tool_calls": parallel, "tool_choice": "required"})
    assert not forced.request.sampling.single_call  # it ends with its one call anyway


@pytest.mark.parametrize(("texts", "expected"), [(TWO_CALLS, "tool_calls"), ([TWO_CALLS[1][:45]], "length")])
def test_a_single_complete_call_is_not_incomplete(texts: list[str], expected: str) -> None:
    call = chat(CHAT | {"tools": [LOOK, WAIT], "parallel_tool_calls": False, "stream": True})
    deltas = [TextDelta(text, (65,)) for text in texts]
    deltas[-1] = msgspec.structs.replace(deltas[-1], finish_reason="length")
    events: list[Event] = [*deltas, End("done", Usage(1, 3))]
    assert json.loads(call.view.open(facts()).whole(events))["choices"][0]["finish_reason"] == expected
    encoder = call.view.open(facts())
    streamed = b"".join(encoder.encode(n, event) for n, event in enumerate(events, 1))
    assert f'"finish_reason":"{expected}"'.encode() in streamed


def test_parallel_calls_can_be_disabled_without_tools() -> None:
    assert chat(CHAT | {"parallel_tool_calls": False}).request == chat(CHAT).request
    for value in (True, False):
        assert completion(TEXT | {"parallel_tool_calls": value}).ignored == ("parallel_tool_calls",)


def test_tools_that_the_template_cannot_show_are_left_out_unless_one_must_be_called() -> None:
    bare = FakeServer(tool_format="")
    body = CHAT | {"tools": [LOOK], "response_format": {"type": "json_object"}}
    call = openai.parse_chat(parsed(body, server=bare))
    assert (call.request.tools, call.ignored) == ((), ("tools",))
    assert call.request.sampling.grammar is not None
    forced = openai.parse_chat(parsed(CHAT | {"tools": [LOOK], "tool_choice": "required"}, server=bare))
    assert (forced.request.tools, forced.ignored) == ((LOOK,), ())


def test_logprobs_beside_tools_are_those_of_all_tokens_once() -> None:
    body = CHAT | {"tools": [LOOK], "logprobs": True, "stream": True}
    texts = ["So ", "<tool", '_call>{"name": "look", "arg', 'uments": {}}</tool_call>', ""]
    deltas = [TextDelta(text, (65 + n,), logprobs=(-0.5 * n,)) for n, text in enumerate(texts)]
    deltas[-1] = msgspec.structs.replace(deltas[-1], finish_reason="stop")
    encoder = chat(body).view.open(facts())
    frames = [line for n, delta in enumerate(deltas, 1) for line in encoder.encode(n, delta).decode().splitlines()]
    found = [json.loads(line[6:])["choices"][0]["logprobs"] for line in frames if line]
    shown = [token["logprob"] for logprobs in found if logprobs for token in logprobs["content"]]
    assert shown == [delta.logprobs[0] for delta in deltas]


def test_the_model_may_not_call() -> None:
    names, grammar, view = tools_of("none")
    assert (names, grammar, view.calls) == ((), None, None)


def call_schema(name: str, arguments: JsonBody) -> JsonBody:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def test_the_model_must_call_one_or_a_certain_one() -> None:
    look = {"name": "look", "where": "tools[0]", "schema": LOOK["function"]["parameters"]}
    wait = {"name": "wait", "where": "tools[1]", "schema": None}
    for choice, asked in (
        ("required", [look, wait]),
        ({"type": "function", "function": {"name": "look"}}, [look]),
        ({"function": {"name": "wait"}}, [wait]),
    ):
        names, grammar, view = tools_of(choice)
        assert grammar is not None
        source = json.loads(grammar.source)
        assert (names, grammar.kind, grammar.param) == (("look", "wait"), "calls", "tools")
        assert (source["tools"], source["forced"], source["answer"]) == (asked, True, None)
        assert view.calls is not None
        assert view.calls.forced


def _allowed(mode: str, *names: str) -> JsonBody:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [LOOK, {"type": "function", "function": {"name": "look"}}]}, "tools[1]"),
        ({"tools": [{**LOOK, "function": {"name": f"f{i}"}} for i in range(1_025)]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "wait"}}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": "wait"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": _allowed("required", "wait")}, "tool_choice"),
        ({"tools": [LOOK], "response_format": {"type": "regex", "value": "a"}}, "response_format"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be(more: JsonBody, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(CHAT | more)
    assert caught.value.param == param


def test_tools_and_a_schema_can_be_combined() -> None:
    call = chat(CHAT | {"tools": [LOOK], "response_format": {"type": "json_object", "schema": {"const": "42"}}})
    grammar = call.request.sampling.grammar
    assert (call.request.tools, grammar and grammar.kind, grammar and grammar.param) == (
        (LOOK,),
        "calls",
        "response_format",
    )
    assert grammar is not None
    source = json.loads(grammar.source)
    assert (source["answer"], source["answer_param"], source["forced"]) == ({"const": "42"}, "response_format", False)
    assert chat(CHAT | {"tools": [LOOK], "response_format": {"type": "text"}}).request.sampling.grammar is None


# Usage, and what is unknown or refused


def test_usage_is_requested_only_for_streams() -> None:
    options = {"stream_options": {"include_usage": True}}
    with_usage = chat(CHAT | options | {"stream": True})
    assert with_usage.view != chat(CHAT | {"stream": True}).view
    for none in ({"include_usage": False}, {"include_usage": None}, {}, None):
        assert chat(CHAT | {"stream": True, "stream_options": none}).view == chat(CHAT).view
    for body in (CHAT | options, CHAT | options | {"stream": False}):
        assert chat(body).ignored == ("stream_options",)
    with pytest.raises(RequestError) as refused:
        completion(TEXT | {"stream": True, "stream_options": {"include_usage": 1}})
    assert refused.value.param == "stream_options.include_usage"


def test_continuous_usage_counts_the_tokens_so_far() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    deltas = [TextDelta("a", (65,)), TextDelta("bc", (66, 67)), TextDelta("", (256,), finish_reason="stop")]

    def counts(view: View) -> list[int]:
        encoder = view.open(facts())
        frames = b"".join(encoder.encode(seq, delta) for seq, delta in enumerate(deltas, 1)).decode().split("\n\n")
        return [json.loads(frame[6:])["usage"]["completion_tokens"] for frame in frames if frame]

    assert counts(chat(CHAT | {"stream": True, "stream_options": options}).view) == [0, 1, 3, 4]
    assert counts(completion(TEXT | {"stream": True, "stream_options": options}).view) == [1, 3, 4]


def test_continuous_usage_without_usage_is_none() -> None:
    both = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    usual = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}}
    assert chat(CHAT | both).view != chat(CHAT | usual).view
    neither = chat(CHAT | {"stream": True, "stream_options": {"continuous_usage_stats": True}})
    assert neither.view == chat(CHAT | {"stream": True}).view


def test_unknown_fields_are_named_and_known_ones_are_not() -> None:
    everything = {
        "store": False,
        "metadata": {},
        "user": "me",
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
    }
    assert chat(CHAT | everything).ignored == ("metadata", "store", "user")
    assert completion(TEXT | {"suffix": "", "echo": False, "x": 1}).ignored == ("x",)


def test_llama_cpps_names_work_on_the_same_path() -> None:
    theirs = {"n_predict": 7, "repeat_penalty": 1.2, "cache_prompt": True, "json_schema": {"type": "object"}}
    ours = {"max_tokens": 7, "repetition_penalty": 1.2, "guided_json": {"type": "object"}}
    assert chat(CHAT | theirs) == chat(CHAT | ours)
    assert chat(CHAT | {"n_predict": -1}).request.sampling.max_tokens == NO_LIMIT
    assert chat(CHAT | {"cache_prompt": False}).ignored == ("cache_prompt",)


def test_a_format_works_for_completions_too() -> None:
    assert completion(TEXT | {"response_format": {"type": "json_object"}}).request.sampling.grammar is not None


def test_unknown_names_are_safe_for_a_header() -> None:
    names = {f"\r\n\u2028{i:03}" + "x" * 100: 1 for i in range(50)}
    ignored = chat(CHAT | names).ignored
    assert len(ignored) == 50
    assert all(name.isascii() and name.isprintable() and len(name) <= 40 for name in ignored)


_NO_WORDS: tuple[object, ...] = ("<|im_end|>", "x" * 65, [], {}, 2**70)


@pytest.mark.parametrize(
    "wrong", [*({"a": value} for value in _NO_WORDS), {str(number): 1 for number in range(17)}, [], "a"], ids=str
)
def test_invalid_values_for_the_template(wrong: object) -> None:
    with pytest.raises(RequestError) as caught:
        chat(CHAT | {"chat_template_kwargs": wrong})
    assert caught.value.param is not None
    assert caught.value.param.startswith("chat_template_kwargs")


def test_values_for_the_template() -> None:
    given = {"enable_thinking": False, "reasoning_effort": "low", "budget": 12, "x": None}
    assert chat(CHAT | {"chat_template_kwargs": given}).request.template_values == given


# Models


def test_models() -> None:
    server = FakeServer(model="a\u00df", started_s=5, max_total_tokens=99)
    model = {
        "id": "a\u00df",
        "object": "model",
        "created": 5,
        "owned_by": "tailrace",
        "max_model_len": 99,
        "capabilities": ["completion", "tools", "thinking", "insert"],
        "state": "ready",
    }
    reply = list_models(parsed(server=server))
    assert (reply.status, reply.media_type) == (200, "application/json")
    assert json.loads(reply.body) == {"object": "list", "data": [model]}
    assert json.loads(show_model(parsed(server=server, path={"name": "a\u00df"})).body) == model
    assert list_models(parsed(server=FakeServer(model="\u2028"))).body.isascii()
    bare = json.loads(show_model(parsed(server=FakeServer(tool_format=""), path={"name": "scripted"})).body)
    assert bare["capabilities"] == ["completion", "thinking", "insert"]


@pytest.mark.parametrize("name", ["", "scripte", "scripted/", "../scripted", "SCRIPTED"])
def test_unknown_models(name: str) -> None:
    with pytest.raises(UnknownModel):
        show_model(parsed(path={"name": name}))
