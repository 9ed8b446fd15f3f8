"""Ollama's wire: requests and answers."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dialects.fake_server import FakeServer, parsed, prompt_of, view_of
from tests.dialects.transcripts import GOLDEN, facts
from tests.examples import examples

from tailrace.dialects import GenerateCall
from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.wire import Reply, Show
from tailrace.errors import (
    ContextLengthExceeded,
    EngineLost,
    QueueFull,
    RequestError,
    UnknownModel,
    UnsupportedOperation,
    UnsupportedParameter,
)
from tailrace.types import NO_LIMIT, CallReading, Message, Sampling, TextDelta, ToolCall
from tailrace_plugins.ollama import ollama_models
from tailrace_plugins.ollama import ollama_wire as ollama
from tailrace_plugins.ollama.ollama_answers import OllamaEncoder, OllamaView, encode_error

HI: JsonBody = {"model": "scripted", "prompt": "Hi"}
CHAT: JsonBody = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}
BARE = FakeServer(can_chat=False, tool_format="", parameters=frozenset({"max_tokens", "seed", "temperature"}))
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}


def generate(body: JsonBody, *, server: FakeServer | None = None) -> GenerateCall:
    call = ollama.parse_generate(parsed({**HI, **body}, server=server))
    assert isinstance(call, GenerateCall)
    return call


def chat(body: JsonBody, *, server: FakeServer | None = None) -> GenerateCall:
    call = ollama.parse_chat(parsed({**CHAT, **body}, server=server))
    assert isinstance(call, GenerateCall)
    return call


def sampling(options: JsonBody, **more: object) -> Sampling:
    return generate({"options": options, **more}).request.sampling


def shown(path: str, body: JsonBody | None = None, *, server: FakeServer | None = None) -> JsonBody:
    (act,) = [operation.act for operation in ollama.WIRE.operations if operation.path == path]
    assert isinstance(act, Show)
    found: JsonBody = json.loads(act.render(parsed(body, server=server)).body)
    return found


def test_it_streams_unless_stream_is_false() -> None:
    assert chat({}).stream
    assert chat({"stream": True}).stream
    assert chat({"stream": None}).stream
    assert not chat({"stream": False}).stream


def test_defaults_are_ollamas_if_the_engine_supports_them() -> None:
    assert generate({}).request.sampling == Sampling(temperature=0.8, top_k=40, top_p=0.9)
    assert generate({}, server=BARE).request.sampling == Sampling(temperature=0.8)
    assert sampling({"temperature": 0}) == Sampling(temperature=0.0)


def test_what_a_model_recommends_comes_before_ollamas_defaults() -> None:
    server = FakeServer(recommended_sampling={"temperature": 0.6, "repetition_penalty": 1.5})
    expected = Sampling(temperature=0.6, top_k=40, top_p=0.9, repetition_penalty=1.5)
    assert generate({}, server=server).request.sampling == expected
    unpenalized = {"options": {"repeat_last_n": 0, "repeat_penalty": 1.3}}
    assert generate(unpenalized, server=server).request.sampling.repetition_penalty == 1.0


def test_options() -> None:
    options = {
        "num_predict": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.1,
        "typical_p": 0.75,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 0,
        "stop": ["x", "yz"],
    }
    assert sampling(options) == Sampling(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.1,
        typical_p=0.75,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=0,
        max_tokens=7,
        stop=("x", "yz"),
    )


def test_a_seed_of_minus_one_is_no_seed() -> None:
    assert sampling({"seed": -1}).seed is None


@pytest.mark.parametrize("model", ["scripted", "scripted:latest"])
def test_a_model_may_have_the_tag_latest(model: str) -> None:
    assert generate({"model": model}).request.model == "scripted"
    assert shown("/api/show", {"model": model})["capabilities"] == ["completion", "tools", "thinking", "insert"]


def test_an_unknown_model_is_passed_to_the_server() -> None:
    assert generate({"model": "scripted:135m"}).request.model == "scripted:135m"


def test_a_bare_prompt_is_a_chats_turn_where_the_model_can_chat() -> None:
    assert generate({}).request.messages == (Message("user", "Hi"),)
    assert prompt_of(generate({}, server=BARE).request) == "Hi"
    assert prompt_of(generate({}, server=FakeServer(prompt_template="<{prompt}>")).request) == "<Hi>"


def test_a_raw_prompt_is_not_changed() -> None:
    assert prompt_of(generate({"raw": True}).request) == "Hi"
    with pytest.raises(RequestError, match="raw cannot be used with system"):
        generate({"raw": True, "system": "Be brief."})


def test_a_system_prompt() -> None:
    assert generate({"system": "Be brief."}).request.messages == (Message("system", "Be brief."), Message("user", "Hi"))


def test_a_chat_that_ends_with_an_answer_is_continued() -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "He"}]
    assert chat({"messages": turns}).request.continue_final
    assert not chat({}).request.continue_final


def test_calls_and_their_results_are_given_ids() -> None:
    calls = [{"function": {"name": name, "arguments": {"n": n}}} for n, name in enumerate(("look", "ask", "look"))]
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "a", "tool_name": "ask"},
        {"role": "tool", "content": "b"},
        {"role": "tool", "content": "c", "tool_name": "look"},
        {"role": "tool", "content": "d", "tool_name": "look"},
        {"role": "tool", "content": "e", "tool_call_id": "its own"},
    ]
    _, asking, *results = chat({"messages": turns}).request.messages
    assert asking.tool_calls == (
        ToolCall("call00001", "look", '{"n":0}'),
        ToolCall("call00002", "ask", '{"n":1}'),
        ToolCall("call00003", "look", '{"n":2}'),
    )
    answered = [(result.content, result.tool_call_id) for result in results]
    assert answered == [("a", "call00002"), ("b", "call00001"), ("c", "call00003"), ("d", ""), ("e", "its own")]


def test_many_calls_and_results_are_matched_in_linear_time() -> None:
    calls = [{"function": {"name": "look", "arguments": {}}}] * 2000
    others = [{"role": "tool", "content": "", "tool_name": "ask"}] * 2000
    ours = [{"role": "tool", "content": "", "tool_name": name} for name in ("look", None)] * 1000
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": calls}, *others, *ours]
    messages = chat({"messages": turns}).request.messages
    assert [message.tool_call_id for message in messages[2:2002]] == [""] * 2000
    assert [message.tool_call_id for message in messages[2002:]] == [f"call{n:05}" for n in range(1, 2001)]


def test_tools_are_shown_and_their_calls_read() -> None:
    call = chat({"tools": [TOOL]})
    assert call.request.tools == (TOOL,)
    assert view_of(call) == OllamaView("scripted", is_chat=True, calls=CallReading(tools={"look": {}}))
    assert chat({"tools": []}).request.tools == ()


def test_tools_without_support_in_the_template_are_left_out_and_named() -> None:
    call = chat({"tools": [TOOL]}, server=FakeServer(tool_format=""))
    assert (call.request.tools, call.ignored) == ((), ("tools",))
    assert view_of(call) == OllamaView("scripted", is_chat=True)


def test_formats() -> None:
    assert sampling({}, format="").grammar is None
    grammar = sampling({}, format="json").grammar
    assert grammar is not None
    assert json.loads(grammar.source) == {"type": "object"}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammar = sampling({}, format=schema).grammar
    assert grammar is not None
    assert json.loads(grammar.source) == schema


def test_logprobs() -> None:
    wanted = sampling({}, logprobs=True, top_logprobs=3)
    assert (wanted.logprobs, wanted.top_logprobs) == (True, 3)
    assert sampling({}, top_logprobs=3) == wanted


@pytest.mark.parametrize(
    "body",
    [
        {"context": [], "images": [], "suffix": "", "template": "", "think": False, "truncate": False},
        {"context": None, "think": None, "options": None},
        {"options": {"mirostat": 0, "repeat_last_n": -1, "tfs_z": 1.0, "penalize_newline": True}},
    ],
)
def test_neutral_values_are_accepted(body: JsonBody) -> None:
    assert generate(body).ignored == ()


def test_options_of_loading_are_ignored_and_named() -> None:
    body = {"keep_alive": "5m", "options": {"num_ctx": 8192, "num_gpu": 1, "num_keep": 4}}
    assert generate(body).ignored == ("keep_alive", "options.num_ctx", "options.num_gpu")


@pytest.mark.parametrize(
    "body",
    [
        {"model": ""},
        {"model": 5},
        {"prompt": 5},
        {"format": "xml"},
        {"format": 5},
        {"options": []},
        {"options": {"num_predict": 1.5}},
        {"options": {"temperature": "hot"}},
        {"options": {"top_p": 1.1}},
        {"options": {"stop": ["a"] * 33}},
        {"top_logprobs": 21, "logprobs": True},
        {"stream": "yes"},
        {"system": 5},
    ],
)
def test_wrong_values_are_refused(body: JsonBody) -> None:
    with pytest.raises(RequestError):
        generate(body)


@pytest.mark.parametrize(
    "messages",
    [
        5,
        [5],
        [{"content": "Hi"}],
        [{"role": "robot", "content": "Hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    ],
)
def test_wrong_messages_are_refused(messages: object) -> None:
    with pytest.raises(RequestError):
        chat({"messages": messages})


def test_tools_and_a_format_can_be_combined() -> None:
    grammar = chat({"tools": [TOOL], "format": "json"}).request.sampling.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.param) == ("calls", "format")
    assert json.loads(grammar.source)["answer"] == {"type": "object"}


@pytest.mark.parametrize("body", [{"prompt": ""}, {"prompt": None}, {"stream": False, "prompt": ""}])
def test_a_request_without_a_prompt_loads_the_model(body: JsonBody) -> None:
    reply = ollama.parse_generate(parsed({**HI, **body}))
    assert isinstance(reply, Reply)
    head = {"model": "scripted", "created_at": "2023-11-14T22:13:20Z"}
    assert json.loads(reply.body) == {**head, "response": "", "done": True, "done_reason": "load"}
    reply = ollama.parse_chat(parsed({**CHAT, "messages": []}))
    assert isinstance(reply, Reply)
    message = {"role": "assistant", "content": ""}
    assert json.loads(reply.body) == {**head, "message": message, "done": True, "done_reason": "load"}


def test_a_request_without_a_prompt_for_another_model_is_refused() -> None:
    with pytest.raises(UnknownModel):
        ollama.parse_generate(parsed({"model": "other"}))
    with pytest.raises(UnknownModel):
        shown("/api/show", {"model": "other"})
    with pytest.raises(RequestError, match="model is required"):
        shown("/api/show", {})


@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [
        (0, "unload"),
        (0.0, "unload"),
        ("0", "unload"),
        ("0h", "unload"),
        ("0.0s", "unload"),
        (5, "load"),
        ("5m", "load"),
    ],
)
def test_a_client_that_unloads_the_model_is_answered_as_by_ollama(keep_alive: object, reason: str) -> None:
    for body in ({"model": "scripted"}, {"model": "scripted", "messages": []}):
        parse = ollama.parse_chat if "messages" in body else ollama.parse_generate
        reply = parse(parsed({**body, "keep_alive": keep_alive}))
        assert isinstance(reply, Reply)
        assert json.loads(reply.body)["done_reason"] == reason
        assert reply.ignored == ("keep_alive",)
    assert generate({"keep_alive": keep_alive}).ignored == ("keep_alive",)
    assert generate({"keep_alive": -1}).ignored == ()


@pytest.mark.parametrize("name", ["scripted", "scripted:latest", "default"])
def test_pulling_a_served_model_succeeds(name: str) -> None:
    for body in ({"model": name}, {"name": name, "stream": True}, {"model": name, "stream": False, "insecure": True}):
        reply = ollama_models.pull(parsed(body))
        assert reply.status == 200
        assert json.loads(reply.body.splitlines()[-1]) == {"status": "success"}
        assert ("ndjson" in reply.media_type) == (body.get("stream") is not False)


def test_another_model_cannot_be_pulled() -> None:
    with pytest.raises(UnknownModel, match="cannot fetch"):
        ollama_models.pull(parsed({"model": "other"}))
    with pytest.raises(RequestError, match="model is required"):
        ollama_models.pull(parsed({}))


def test_the_version_is_one_that_clients_take() -> None:
    """Codex 0.169 asks for 0.13.4; others for 0.14, the first one with Anthropic's API."""
    assert [int(part) for part in shown("/api/version")["version"].split(".")] >= [0, 14, 0]


def test_ollamas_own_defaults_ask_for_nothing() -> None:
    options = {"repeat_last_n": 64, "mirostat": 0, "tfs_z": 1.0, "num_keep": 4, "penalize_newline": True, "seed": 0,
               "num_predict": -1}  # fmt: skip
    assert generate({"options": options, "truncate": True, "shift": True}).ignored == ()
    assert sampling({"num_predict": -2}) == sampling({"num_predict": -1})
    assert sampling({"num_predict": -1}).max_tokens == NO_LIMIT
    assert sampling({"num_predict": 0}).max_tokens is None
    assert sampling({"repeat_last_n": 0, "repeat_penalty": 1.5}) == sampling({})
    assert sampling({"repeat_last_n": 64, "repeat_penalty": 1.5}).repetition_penalty == 1.5
    assert generate({"options": {"repeat_last_n": 32}}).ignored == ("options.repeat_last_n",)


def test_images_of_tools_and_of_earlier_turns_become_placeholders() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "shoot", "arguments": {}}}]}
    turns = [
        {"role": "user", "content": "q", "images": ["aGk="]},
        called,
        {"role": "tool", "content": "ok", "images": ["aGk="]},
    ]
    call = chat({"messages": turns})
    shown_texts = [message.content for message in call.request.messages]
    assert shown_texts == ["q\n[image omitted]", "", "ok\n[image omitted]"]
    assert call.ignored == ("messages[0].images (image: placeholder)", "messages[2].images (image: placeholder)")
    with pytest.raises(UnsupportedParameter) as caught:
        chat({"messages": turns[:1]})
    assert caught.value.param == "messages[0].images"


@pytest.mark.parametrize("arguments", [None, "", {}, []])
def test_calls_without_arguments(arguments: object) -> None:
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": arguments}}]}
    turns = [{"role": "user", "content": "q"}, called, {"role": "tool", "content": "ok", "tool_name": "a"}]
    assert chat({"messages": turns}).request.messages[1].tool_calls == (ToolCall("call00001", "a", "{}"),)
    assert chat({"messages": turns}).request.messages[2].tool_call_id == "call00001"


def test_the_error_of_a_long_prompt_has_the_words_that_clients_look_for() -> None:
    error = json.loads(encode_error(ContextLengthExceeded(9_006, 8_192))[1])["error"]
    assert "exceeds the context length" in error
    assert "9006" in error


def test_facts_about_the_model() -> None:
    for path in ("/api/tags", "/api/ps"):
        (model,) = shown(path)["models"]
        assert model["name"] == model["model"] == "scripted:latest"
        assert len(model["digest"]) == 64
    assert shown("/api/tags", server=FakeServer(model="a:b"))["models"][0]["name"] == "a:b"
    found = shown("/api/show", {"name": "scripted"}, server=BARE)
    assert found["capabilities"] == ["completion", "thinking", "insert"]
    architecture = found["model_info"]["general.architecture"]
    assert found["model_info"][f"{architecture}.context_length"] == 4096


CARD = replace(
    FakeServer().card,
    format="gguf",
    architecture="llama",
    file_type=15,
    num_parameters=3_212_749_888,
    weight_bytes=2_019_377_376,
)
DETAILS = {
    "parent_model": "",
    "format": "gguf",
    "family": "llama",
    "families": ["llama"],
    "parameter_size": "3.2B",
    "quantization_level": "Q4_K_M",
}


def test_what_the_models_files_say() -> None:
    server = FakeServer(card=CARD)
    for path in ("/api/tags", "/api/ps"):
        (model,) = shown(path, server=server)["models"]
        assert (model["size"], model["details"]) == (2_019_377_376, DETAILS)
    found = shown("/api/show", {"model": "scripted"}, server=server)
    assert found["details"] == DETAILS
    assert found["model_info"]["general.architecture"] == "llama"
    assert found["model_info"]["general.parameter_count"] == 3_212_749_888
    assert found["model_info"]["general.file_type"] == 15


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"projector": Path("mmproj.gguf")}, {"families": ["llama", "clip"]}),
        ({"file_type": None}, {"quantization_level": ""}),
        ({"file_type": 999}, {"quantization_level": ""}),
        (
            {"format": "huggingface", "file_type": None, "quantized_by": "gptq", "weight_type": "I32"},
            {"format": "safetensors", "quantization_level": "GPTQ"},
        ),
        (
            {"format": "huggingface", "file_type": None, "weight_type": "BF16"},
            {"format": "safetensors", "quantization_level": "BF16"},
        ),
        ({"format": "upstream", "architecture": ""}, {"format": "", "family": "", "families": []}),
        ({"num_parameters": 0}, {"parameter_size": ""}),
        ({"num_parameters": 134_515_008}, {"parameter_size": "134.52M"}),
        ({"num_parameters": 7 * 10**9}, {"parameter_size": "7B"}),
        ({"num_parameters": 8_030}, {"parameter_size": "8K"}),
    ],
)
def test_details_of_other_models(changes: JsonBody, expected: JsonBody) -> None:
    server = FakeServer(card=replace(CARD, **changes))
    assert shown("/api/show", {"model": "scripted"}, server=server)["details"] == {**DETAILS, **expected}


def test_a_digest_changes_with_the_model() -> None:
    cards = (CARD, replace(CARD, weight_bytes=1), replace(CARD, file_type=14))
    servers = [*(FakeServer(card=card) for card in cards), FakeServer("other", card=CARD)]
    digests = [shown("/api/tags", server=server)["models"][0]["digest"] for server in servers]
    assert len(set(digests)) == len(digests)
    assert digests[0] == shown("/api/tags", server=FakeServer(card=CARD))["models"][0]["digest"]


def test_quantizations_have_the_names_that_llama_cpp_gives_them() -> None:
    gguf = pytest.importorskip("gguf")
    known = {one.value: one.name.removeprefix("ALL_").removeprefix("MOSTLY_") for one in gguf.LlamaFileType}
    named = {number: name for number, name in ollama_models.QUANTIZATIONS.items() if number in known}
    assert len(named) > 25  # earlier releases of gguf know fewer
    assert {number: known[number].removesuffix("_MOE") for number in named} == named


def test_errors() -> None:
    assert encode_error(RequestError("No.")) == (400, b'{"error":"No."}')
    assert encode_error(UnknownModel("No."))[0] == 404
    assert encode_error(QueueFull("Later."))[0] == 503
    assert encode_error(EngineLost("Gone."))[0] == 503


@pytest.mark.parametrize("view", [OllamaView("a", is_chat=True), OllamaView("a", is_chat=False)])
def test_a_heartbeat_is_an_empty_piece(view: OllamaView) -> None:
    assert view.heartbeat.endswith(b"\n")
    beat = json.loads(view.heartbeat)
    assert not beat["done"]
    assert beat.get("response", beat.get("message", {}).get("content")) == ""


@pytest.mark.parametrize(
    "path", sorted(GOLDEN.glob("ollama*/*.txt")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_every_line_is_json_and_the_last_one_says_how_it_ended(path: object) -> None:
    content = GOLDEN.joinpath(str(path)).read_bytes()
    assert content.isascii()
    assert content.endswith(b"\n")
    assert content.decode().splitlines() == content.decode().split("\n")[:-1]
    *lines, last = [json.loads(line) for line in content.splitlines()]
    assert all(line["done"] is False and "error" not in line for line in lines)
    assert last.get("done") or set(last) - {"stream_id", "last_seq"} == {"error", "retryable"}


def test_infinite_logprobs_are_numbers() -> None:
    encoder = OllamaEncoder(facts(), OllamaView("scripted", is_chat=False, logprobs=True))
    line = json.loads(encoder.encode(1, TextDelta("a", (97, 97, 97), 0, (-inf, nan, inf))))
    assert [entry["logprob"] for entry in line["logprobs"]] == [-9999.0] * 3


def test_alternatives() -> None:
    encoder = OllamaEncoder(facts(), OllamaView("scripted", is_chat=False, logprobs=True))
    line = json.loads(encoder.encode(1, TextDelta("a", (97,), 0, (-0.5,), top_logprobs=(((97, -0.5), (98, -1.0)),))))
    (entry,) = line["logprobs"]
    assert [(one["token"], one["logprob"]) for one in entry["top_logprobs"]] == [("a", -0.5), ("b", -1.0)]


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.text(max_size=20), max_size=8), st.booleans())
def test_lines_carry_the_whole_text(texts: list[str], reads_tools: bool) -> None:
    encoder = OllamaEncoder(facts(), OllamaView("scripted", is_chat=True, calls=CallReading() if reads_tools else None))
    deltas = [TextDelta(text, (97,)) for text in texts] + [TextDelta("", (256,), finish_reason="stop")]
    lines = b"".join(encoder.encode(seq, delta) for seq, delta in enumerate(deltas, 1))
    shown = [json.loads(line) for line in lines.decode().splitlines()]
    assert "".join(line["message"]["content"] for line in shown) == "".join(texts)


def test_a_request_without_tools_is_shown_as_it_is() -> None:
    view = replace(OllamaView("scripted", is_chat=True))
    line = OllamaEncoder(facts(), view).encode(1, TextDelta("<tool_call>", (97,)))
    assert json.loads(line)["message"]["content"] == "<tool_call>"


@pytest.mark.parametrize("path", ["/api/create", "/api/copy", "/api/push", "/api/blobs/{digest}"])
def test_unsupported_operations_are_refused_by_name(path: str) -> None:
    with pytest.raises(UnsupportedOperation, match="chosen when"):
        shown(path, {"model": "x"})
