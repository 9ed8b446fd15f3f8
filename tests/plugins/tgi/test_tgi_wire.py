"""TGI's requests and refusals. Source: text-generation-inference 3.3.7, router/src/validation.rs and lib.rs.

What its answers look like is in `test_tgi_answers.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from msgspec import structs
from tests.dialects.fake_server import BOS, EVERYTHING, FakeServer, parsed, prompt_of, vocabulary
from tests.dialects.fake_server import generate as generate_stream
from tests.dialects.transcripts import STREAMS, VIEWS, facts

from tailrace.dialects import GenerateCall
from tailrace.dialects.bodies import JsonBody
from tailrace.errors import (
    ContextLengthExceeded,
    Draining,
    EngineLost,
    QueueFull,
    RequestError,
    SequenceFailed,
    TailraceError,
    UnknownStream,
    UnsupportedMediaType,
    UnsupportedParameter,
)
from tailrace.types import End, Failure, Grammar, Sampling, Usage
from tailrace_plugins.tgi import tgi_tokenize
from tailrace_plugins.tgi import tgi_wire as tgi


def parse(parameters: JsonBody | None = None, **more: object) -> GenerateCall:
    """POST /generate_stream."""
    return generate_stream({"inputs": "Hi", **more} | ({} if parameters is None else {"parameters": parameters}))


def parse_whole(
    parameters: JsonBody | None = None, *, server: FakeServer | None = None, **more: object
) -> GenerateCall:
    """POST /generate."""
    body: JsonBody = {"inputs": "Hi", **more} | ({} if parameters is None else {"parameters": parameters})
    return tgi.parse_generate(parsed(body, server=server))


GREEDY = Sampling(temperature=0.0, include_stop=True, logprobs=True)
SAMPLED = Sampling(include_stop=True, logprobs=True)


def test_defaults() -> None:
    call = parse({})
    assert call.request.sampling == GREEDY
    assert (call.request.prompts, call.request.truncate, call.request.on_disconnect) == (("Hi",), None, "cancel")
    assert call.stream
    assert not parse_whole({}).stream
    assert replace(parse_whole({}), stream=True) == call


def test_without_parameters_sampling_is_on() -> None:
    assert parse().request.sampling == SAMPLED
    assert parse_whole().request.sampling == SAMPLED
    assert tgi.parse_root(parsed({"inputs": "Hi"})).request.sampling == SAMPLED


@pytest.mark.parametrize(
    "parameters",
    [{"do_sample": True}, {"temperature": 0.5}, {"temperature": 1.5}, {"top_k": 5}, {"top_p": 0.5}, {"typical_p": 0.5}],
)
def test_what_switches_sampling_on(parameters: JsonBody) -> None:
    assert parse(parameters).request.sampling.temperature > 0


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 1.0},
        {"seed": 1},
        {"repetition_penalty": 2.0},
        {"top_n_tokens": 3},
        {"temperature": 1e-4, "do_sample": True, "top_p": 0.5, "top_k": 5, "typical_p": 0.5},
    ],
)
def test_what_does_not_switch_sampling_on(parameters: JsonBody) -> None:
    sampling = parse(parameters).request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.typical_p) == (0, 1, 0, 1)


def test_every_field_arrives() -> None:
    parameters = {
        "temperature": 0.5,
        "repetition_penalty": 1.5,
        "frequency_penalty": -1.5,
        "top_k": 7,
        "top_p": 0.25,
        "typical_p": 0.75,
        "max_new_tokens": 11,
        "stop": ["a", "b"],
        "truncate": 3,
        "seed": 2**64 - 1,
        "top_n_tokens": 5,
        "grammar": {"type": "regex", "value": "a+"},
    }
    request = parse(parameters).request
    assert (prompt_of(request), request.truncate) == ("Hi", 3)
    assert request.sampling == Sampling(
        temperature=0.5,
        repetition_penalty=1.5,
        frequency_penalty=-1.5,
        top_k=7,
        top_p=0.25,
        typical_p=0.75,
        max_tokens=11,
        stop=("a", "b"),
        seed=2**64 - 1,
        top_logprobs=5,
        grammar=Grammar("regex", "a+"),
        include_stop=True,
        logprobs=True,
    )
    assert parse_whole({"best_of": 2, "do_sample": True}).request.sampling == structs.replace(SAMPLED, n=2)


def test_nulls_mean_absent() -> None:
    nullable = ["temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p", "max_new_tokens", "seed"]
    nullable += ["return_full_text", "truncate", "best_of", "typical_p", "top_n_tokens", "grammar", "adapter_id"]
    nullable += ["stop", "do_sample", "details", "decoder_input_details", "watermark"]
    assert parse(dict.fromkeys(nullable)) == parse({})


# Refusals. The rows of the reference, in the order in which TGI meets them; `stream` is in those of /generate_stream.

ROWS: list[tuple[str, JsonBody, str]] = [
    ("best_of", {"best_of": 2, "stream": True}, "`best_of` != 1 is not supported when streaming tokens"),
    ("prefill", {"decoder_input_details": True, "stream": True},
     "`decoder_input_details` == true is not supported when streaming tokens"),
    ("best_of_range", {"best_of": 3}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ("best_of_greedy", {"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ("temperature", {"temperature": 0}, "`temperature` must be strictly positive"),
    ("repetition_penalty", {"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
    ("frequency_penalty", {"frequency_penalty": 2.01}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ("top_p", {"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ("typical_p", {"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ("top_k", {"top_k": 0}, "`top_k` must be strictly positive"),
    ("max_new_tokens", {"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ("stop", {"stop": ["a"] * 33}, "`stop` supports up to 32 stop sequences. Given: 33"),
    ("best_of_seed", {"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
    ("top_n_tokens", {"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ("inputs", {"inputs": ""}, "`inputs` cannot be empty"),
    ("truncate", {"truncate": 4096}, "`truncate` must be strictly positive and less than 4095. Given: 4096"),
    (
        "grammar",
        {"grammar": {"type": "json", "value": {}}},
        "grammar is not valid: Grammar must have a 'properties' field",
    ),
]  # fmt: skip


def refusal(fields: JsonBody, *, server: FakeServer | None = None) -> JsonBody:
    """Return the refusal as a client reads it. `inputs` and `stream` go to the top level of the body."""
    parameters = dict(fields)
    inputs = parameters.pop("inputs", "Hi")
    read = tgi.parse_stream if parameters.pop("stream", False) else tgi.parse_generate
    with pytest.raises(RequestError) as caught:
        read(parsed({"inputs": inputs, "parameters": parameters}, server=server))
    status, body = tgi.encode_error(caught.value)
    assert status == 422
    found = json.loads(body)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(("row", "fields", "message"), ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_refusals_have_tgis_messages(row: str, fields: JsonBody, message: str) -> None:
    assert refusal(fields) == {"error": f"Input validation error: {message}", "error_type": "validation"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_of": 0, "stream": True}, "`best_of` != 1 is not supported when streaming tokens"),
        ({"temperature": -1}, "`temperature` must be strictly positive"),
        ({"frequency_penalty": -2.01}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ({"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"typical_p": 0}, "`typical_p` must be > 0.0 and < 1.0"),
        ({"top_k": -1}, "`top_k` must be strictly positive"),
        ({"truncate": 0}, "`truncate` must be strictly positive and less than 4095. Given: 0"),
        ({"grammar": {"type": "json", "value": "a"}},
         "grammar is not valid: Grammar must have a 'properties' field"),
    ],
)  # fmt: skip
def test_more_refusals_have_tgis_messages(fields: JsonBody, message: str) -> None:
    assert refusal(fields)["error"] == f"Input validation error: {message}"


def test_a_grammar_where_the_engine_has_none() -> None:
    server = FakeServer(parameters=EVERYTHING - {"grammar"})
    fields = {"grammar": {"type": "json", "value": {}}}
    assert refusal(fields, server=server)["error"] == "Input validation error: grammar is not supported"


@pytest.mark.parametrize("address", ["https://example.com/a.png", "HTTP://example.com/a.png"])
def test_an_image_of_another_server_is_not_fetched(address: str) -> None:
    with pytest.raises(RequestError, match="must be a data URL") as refused:
        generate_stream({"inputs": f"Look: ![]({address})"}, server=FakeServer(sees=True))
    assert refused.value.param == "inputs"
    assert generate_stream({"inputs": f"![]({address})"}).request.prompts == (f"![]({address})",)


@pytest.mark.parametrize("first", range(len(ROWS)))
def test_refusals_are_in_tgis_order(first: int) -> None:
    """The body has all errors from this row of the table on, as far as one body can; the first one is reported."""
    _, fields, message = ROWS[first]
    together = dict(fields)
    for _, later, _ in ROWS[first + 1 :]:
        if not later.keys() & (together.keys() | {"stream"}) and not (later.keys() & {"best_of"}):
            together |= later
    if "best_of" in together and "do_sample" not in together:
        # These switch sampling on, and so away what is wrong with best_of.
        together = {name: value for name, value in together.items() if name not in ("top_p", "top_k", "typical_p")}
        together |= {"temperature": 1.0} if "temperature" in together else {}
    assert len(together) > len(fields) or first == len(ROWS) - 1
    assert refusal(together)["error"] == f"Input validation error: {message}"


@pytest.mark.parametrize(
    "parameters",
    [
        {"max_new_tokens": -1},
        {"max_new_tokens": 2**32},
        {"max_new_tokens": 1.5},
        {"top_k": 2**31},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 10**30},
        {"truncate": -1},
        {"stop": "a"},
        {"stop": ["x" * 257]},
        {"temperature": "1"},
        {"temperature": 100.5},
        {"repetition_penalty": 1e30},
        {"details": 1},
        {"return_full_text": "yes"},
        {"best_of": -1},
        {"top_n_tokens": "1"},
        {"grammar": "a"},
        {"grammar": {"type": "regex"}},
        {"grammar": {"value": "a"}},
        {"grammar": {"type": "gbnf", "value": "root"}},
        {"grammar": {"type": "regex", "value": ["a"]}},
    ],
)
def test_ranges_and_types(parameters: JsonBody) -> None:
    with pytest.raises(RequestError) as caught:
        parse_whole(parameters)
    param = str(caught.value.param).removeprefix("parameters.")
    assert param.partition("[")[0].partition(".")[0] == next(iter(parameters))


@pytest.mark.parametrize(
    "parameters", [{"truncate": 4095}, {"truncate": 1}, {"best_of": 0}, {"stop": list("abcd")}, {"top_n_tokens": 5}]
)
def test_allowed_extremes(parameters: JsonBody) -> None:
    assert parse_whole(parameters).request.prompts == ("Hi",)


@pytest.mark.parametrize(
    ("grammar", "kind", "source"),
    [
        ({"type": "json", "value": {"properties": {"a": {"type": "integer"}}}}, "json_schema",
         '{"properties":{"a":{"type":"integer"}}}'),
        ({"type": "json_object", "value": {"properties": {}}}, "json_schema", '{"properties":{}}'),
        ({"type": "json_schema", "value": {"name": "x", "schema": {"properties": {}}}}, "json_schema",
         '{"properties":{}}'),
        ({"type": "json_schema", "value": {"properties": {}}}, "json_schema", '{"properties":{}}'),
        ({"type": "regex", "value": "[0-9]{1,3}(\\\\.[0-9]+)?"}, "regex", "[0-9]{1,3}(\\\\.[0-9]+)?"),
    ],
)  # fmt: skip
def test_grammars(grammar: JsonBody, kind: str, source: str) -> None:
    found = parse({"grammar": grammar}).request.sampling.grammar
    assert found is not None
    assert (found.kind, found.source) == (kind, source)


@pytest.mark.parametrize("inputs", [None, "", 1, ["Hi"]])
def test_inputs(inputs: object) -> None:
    with pytest.raises(RequestError) as caught:
        generate_stream({"inputs": inputs, "parameters": {}})
    assert str(caught.value.param).startswith("inputs")
    with pytest.raises(RequestError, match="`inputs`"):
        generate_stream({})


def test_unknown_fields_are_named_on_both_levels() -> None:
    assert parse({"watermark": False, "b": 1}, a=1).ignored == ("a", "parameters.b")
    assert parse({"grammar": {"type": "regex", "value": "a", "c": 1}}).ignored == ("parameters.grammar.c",)


@pytest.mark.parametrize(
    ("read", "given", "streams"),
    [
        (tgi.parse_root, True, True),
        (tgi.parse_root, False, False),
        (tgi.parse_root, None, False),
        (tgi.parse_generate, True, False),
        (tgi.parse_stream, False, True),
    ],
)
def test_the_route_decides_about_streaming(read: object, given: bool | None, streams: bool) -> None:
    assert callable(read)
    call = read(parsed({"inputs": "Hi"} | ({} if given is None else {"stream": given})))
    assert isinstance(call, GenerateCall)
    assert call.stream is streams


@pytest.mark.parametrize("read", [tgi.parse_root, tgi.parse_generate, tgi.parse_stream])
@pytest.mark.parametrize("given", [None, True, False])
def test_the_full_text(read: object, given: bool | None) -> None:
    """By default, the root route returns the prompt and the others do not."""
    assert callable(read)
    call = read(parsed({"inputs": "Hi", "parameters": {"return_full_text": given}}))
    answer = json.loads(call.view.open(facts()).whole(STREAMS["plain"]))
    shown = read is tgi.parse_root if given is None else given
    expected = {"generated_text": (facts().record.prompts[0].text if shown else "") + " the river"}
    assert answer == ([expected] if read is tgi.parse_root else expected)


@pytest.mark.parametrize("failed", ["error", "cancelled", "interrupted", "refused"])
@pytest.mark.parametrize("view", ["tgi", "chat", "completion", "cumulative", "plain"])
def test_no_whole_answer_of_a_stream_that_failed(view: str, failed: str) -> None:
    encoder = VIEWS[view].open(facts())
    with pytest.raises(TailraceError) as caught:
        encoder.whole(STREAMS[failed])
    end = STREAMS[failed][-1]
    assert isinstance(end, End)
    assert caught.value.code == (end.failure.code if end.failure else "cancelled")


# Errors


@pytest.mark.parametrize(
    ("error", "status", "text", "kind"),
    [
        (RequestError("m"), 422, "Input validation error: m", "validation"),
        (UnsupportedParameter("m"), 422, "Input validation error: m", "validation"),
        (UnsupportedMediaType("m"), 415, "Input validation error: m", "validation"),
        (ContextLengthExceeded(90, 80), 422,
         "Input validation error: `inputs` must have less than 80 tokens. Given: 90", "validation"),
        (ContextLengthExceeded(70, 80, max_tokens=20), 422,
         "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 80. Given: 70 `inputs` tokens and 20 "
         "`max_new_tokens`", "validation"),
        (QueueFull("m"), 429, "Model is overloaded", "overloaded"),
        (Draining("m"), 429, "Model is overloaded", "overloaded"),
        (EngineLost("m"), 424, "Request failed during generation: m", "generation"),
        (SequenceFailed("m"), 424, "Request failed during generation: m", "generation"),
        (UnknownStream("m"), 404, "m", "unknown_stream"),
        (TailraceError("m"), 500, "m", "internal_error"),
    ],
)  # fmt: skip
def test_errors(error: TailraceError, status: int, text: str, kind: str) -> None:
    shown, body = tgi.encode_error(error)
    assert shown == status
    assert body == f'{{"error":"{text}","error_type":"{kind}"}}'.encode()


def test_errors_are_ascii() -> None:
    end = End("error", Usage(1, 0), Failure("sequence_failed", "\u2028\u00df\n"))
    event = VIEWS["tgi"].open(facts()).encode(1, end)
    assert event.isascii()
    assert event.count(b"\n") == 2


# What the server knows anyway


def test_info_has_the_names_of_tgi_in_their_order() -> None:
    server = FakeServer(model="m", max_requests=7, max_total_tokens=100, max_prompts=5, version="1.2")
    shown = json.loads(tgi.show_info(parsed(server=server)).body)
    assert list(shown) == [
        *("model_id", "model_sha", "model_pipeline_tag", "max_concurrent_requests", "max_best_of"),
        *("max_stop_sequences", "max_input_tokens", "max_total_tokens", "validation_workers"),
        *("max_client_batch_size", "router", "version", "sha", "docker_label"),
    ]
    assert (shown["model_id"], shown["max_concurrent_requests"], shown["version"]) == ("m", 7, "1.2")
    assert (shown["max_best_of"], shown["max_stop_sequences"], shown["max_client_batch_size"]) == (2, 32, 5)
    assert shown["max_input_tokens"] == shown["max_total_tokens"] - 1 == 99


def test_health() -> None:
    well = tgi.show_health(parsed())
    assert (well.status, json.loads(well.body)) == (200, {"status": "ok"})  # TGI's clients look at the status alone
    ill = tgi.show_health(parsed(server=FakeServer(is_ready=False)))
    assert (ill.status, ill.body) == (503, b'{"error":"unhealthy","error_type":"healthcheck"}')
    assert ill.retry_after_s
    paths = {operation.path for operation in tgi.WIRE.operations if operation.act.__class__.__name__ == "Show"}
    assert {"/health", "/v1/health", "/ping"} <= paths


@pytest.mark.parametrize("text", ["a river runs", "h\u00e9 \U0001f30a", "<|user|>a", "\u2028"])
def test_tokenize(text: str) -> None:
    reply = tgi_tokenize.tokenize(parsed({"inputs": text, "parameters": {"truncate": 1}}))
    assert reply.body.isascii()
    first, *tokens = json.loads(reply.body)
    assert first == {"id": BOS, "text": "", "start": 0, "stop": 0}
    assert [list(token) for token in tokens] == [["id", "text", "start", "stop"]] * len(tokens)
    assert [token["id"] for token in tokens] == vocabulary().encode(text, special=True)
    assert [token["text"] for token in tokens] == [text[token["start"] : token["stop"]] for token in tokens]
    assert "".join(vocabulary().pieces[token["id"]].decode("latin-1") for token in tokens).encode("latin-1") == (
        text.encode()
    )


def test_tokenize_in_the_forms_of_other_servers() -> None:
    """The field with the text says which. Sources: llama.cpp's server README; vLLM's `TokenizeResponse`."""
    ids = vocabulary().encode("a river", special=True)
    for asked, before in (({}, []), ({"add_special": True}, [BOS])):
        shown = json.loads(tgi_tokenize.tokenize(parsed({"content": "a river", **asked})).body)
        assert shown == {"tokens": [*before, *ids]}
    for asked, before in (({}, [BOS]), ({"add_special_tokens": False}, [])):
        shown = json.loads(tgi_tokenize.tokenize(parsed({"prompt": "a river", "model": "scripted", **asked})).body)
        assert shown == {"count": len(before) + len(ids), "max_model_len": 4096, "tokens": [*before, *ids]}
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    shown = json.loads(tgi_tokenize.tokenize(parsed(chat)).body)
    tokens = json.loads(tgi_tokenize.tokenize_chat(parsed(chat)).body)["tokenize_response"]
    assert shown == {"count": len(tokens), "max_model_len": 4096, "tokens": [token["id"] for token in tokens]}


@pytest.mark.parametrize(
    ("body", "server"),
    [
        ({"inputs": ["a river", "b"]}, FakeServer()),
        ({"inputs": ["a river"], "parameters": {}}, FakeServer()),
        ({"inputs": "a river", "add_special_tokens": True}, FakeServer()),
        ({"inputs": "a river"}, FakeServer(task="embed")),
        ({"inputs": "a river"}, FakeServer(task="rank")),
    ],
)
def test_tokenize_in_the_form_of_tei(body: JsonBody, server: FakeServer) -> None:
    """A list for each input; added tokens have their names and no place. Source: TEI's `TokenizeResponse`."""
    shown = json.loads(tgi_tokenize.tokenize(parsed(body, server=server)).body)
    texts = body["inputs"] if isinstance(body["inputs"], list) else [body["inputs"]]
    assert len(shown) == len(texts)
    begin = {"id": BOS, "text": vocabulary().pieces[BOS].decode(), "special": True, "start": None, "stop": None}
    for text, (first, *tokens) in zip(texts, shown, strict=True):
        assert first == begin
        assert [list(token) for token in tokens] == [["id", "text", "special", "start", "stop"]] * len(tokens)
        assert [token["id"] for token in tokens] == vocabulary().encode(text, special=True)
        assert [token["text"] for token in tokens] == [text[token["start"] : token["stop"]] for token in tokens]
        assert not any(token["special"] for token in tokens)
    (bare,) = json.loads(tgi_tokenize.tokenize(parsed({"inputs": ["b"], "add_special_tokens": False})).body)
    assert [token["text"] for token in bare] == ["b"]


def test_teis_form_goes_to_the_model_that_makes_vectors() -> None:
    chat, embed = FakeServer(), FakeServer(model="embed", task="embed")
    for body, model in (({"inputs": ["a"]}, embed), ({"inputs": "a"}, chat), ({"inputs": "a", "parameters": {}}, chat)):
        assert tgi_tokenize.find_adapter(replace(parsed(body, server=chat), others=(embed,))) is model
    assert tgi_tokenize.find_adapter(parsed({"inputs": ["a"]}, server=chat)) is chat


def test_the_other_forms_name_their_model() -> None:
    server, other = FakeServer(), FakeServer(model="other")
    bodies: list[JsonBody] = [{"content": "a"}, {"prompt": "a"}, {"messages": []}]
    for text in bodies:
        asked = replace(parsed({**text, "model": "other"}, server=server), others=(other,))
        assert tgi_tokenize.find_adapter(asked) is other
        assert tgi_tokenize.find_adapter(parsed({**text, "model": "nobody"})) is None


def test_chat_tokenize() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "river"}]}]
    shown = json.loads(tgi_tokenize.tokenize_chat(parsed({"messages": messages, "tools": []})).body)
    assert list(shown) == ["tokenize_response", "templated_text"]
    assert shown["templated_text"] == "<|user|>a river\n<|assistant|>"
    ids = vocabulary().encode(shown["templated_text"], special=True)
    assert [token["id"] for token in shown["tokenize_response"]] == ids


@pytest.mark.parametrize("body", [{}, {"inputs": 1}, {"inputs": None}, {"inputs": [1]}, {"inputs": "a", "prompt": "a"}])
def test_texts_that_cannot_be_tokenized(body: JsonBody) -> None:
    with pytest.raises(RequestError) as caught:
        tgi_tokenize.tokenize(parsed(body))
    assert "`inputs`" in caught.value.message or str(caught.value.param).startswith("inputs")
    for messages in (None, [], [{"role": "nobody", "content": "a"}]):
        with pytest.raises(RequestError):
            tgi_tokenize.tokenize_chat(parsed({"messages": messages}))
