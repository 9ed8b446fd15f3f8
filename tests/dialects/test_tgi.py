"""TGI's requests and refusals. Source: text-generation-inference 3.3.7, router/src/validation.rs and lib.rs."""

from __future__ import annotations

import json

import pytest
from tests.dialects.transcripts import STREAMS, VIEWS, facts

from tailrace.dialects import Call, tgi
from tailrace.dialects.wire import JsonBody
from tailrace.errors import (
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
from tailrace.types import End, Failure, Sampling, Usage


def parse(parameters: JsonBody | None = None, **more: object) -> Call:
    body: JsonBody = {"inputs": "Hi", **more}
    if parameters is not None:
        body["parameters"] = parameters
    return tgi.parse(body, stream=True)


GREEDY = Sampling(temperature=0.0, include_stop=True, logprobs=True)
SAMPLED = Sampling(include_stop=True, logprobs=True)


def test_defaults() -> None:
    call = parse({})
    assert call.request.sampling == GREEDY
    assert (call.request.prompt, call.request.truncate, call.request.on_disconnect) == ("Hi", None, "cancel")
    assert call.stream


def test_the_trap_of_the_missing_parameters() -> None:
    assert parse().request.sampling == SAMPLED


@pytest.mark.parametrize(
    "parameters", [{"do_sample": True}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 1.5}]
)
def test_what_switches_sampling_on(parameters: JsonBody) -> None:
    assert parse(parameters).request.sampling.temperature > 0


@pytest.mark.parametrize("parameters", [{"temperature": 1.0}, {"seed": 1}, {"repetition_penalty": 2.0}])
def test_what_does_not_switch_sampling_on(parameters: JsonBody) -> None:
    assert parse(parameters).request.sampling.temperature == 0


def test_every_field_arrives() -> None:
    parameters = {
        "temperature": 0.5,
        "repetition_penalty": 1.5,
        "frequency_penalty": -1.5,
        "top_k": 7,
        "top_p": 0.25,
        "max_new_tokens": 11,
        "stop": ["a", "b"],
        "truncate": 3,
        "seed": 2**64 - 1,
    }
    request = parse(parameters).request
    assert request.truncate == 3
    assert request.sampling == Sampling(
        temperature=0.5,
        repetition_penalty=1.5,
        frequency_penalty=-1.5,
        top_k=7,
        top_p=0.25,
        max_tokens=11,
        stop=("a", "b"),
        seed=2**64 - 1,
        include_stop=True,
        logprobs=True,
    )


def test_nulls_where_tgi_takes_them() -> None:
    nullable = ["temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p", "max_new_tokens", "seed"]
    nullable += ["return_full_text", "truncate", "best_of", "typical_p", "top_n_tokens", "grammar", "adapter_id"]
    assert parse(dict.fromkeys(nullable)) == parse({})


@pytest.mark.parametrize("name", ["stop", "do_sample", "details"])
def test_nulls_where_tgi_does_not(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse({name: None})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temperature": 0}, "`temperature` must be strictly positive"),
        ({"temperature": -1}, "`temperature` must be strictly positive"),
        ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
        ({"frequency_penalty": 2.01}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ({"frequency_penalty": -2.01}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ({"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"top_k": 0}, "`top_k` must be strictly positive"),
        ({"top_k": -1}, "`top_k` must be strictly positive"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
        ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ],
)
def test_refusals_in_the_words_of_tgi(parameters: JsonBody, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(parameters)
    status, body = tgi.encode_error(caught.value)
    assert status == 422
    assert json.loads(body) == {"error": f"Input validation error: {message}", "error_type": "validation"}


def test_the_first_of_two_refusals_is_tgis() -> None:
    with pytest.raises(RequestError, match="temperature"):
        parse({"temperature": 0, "top_p": 1.0, "max_new_tokens": 0})


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
        {"truncate": 0},
        {"truncate": -1},
        {"stop": "a"},
        {"stop": [""]},
        {"temperature": "1"},
        {"details": 1},
        {"return_full_text": "yes"},
    ],
)
def test_ranges_and_types(parameters: JsonBody) -> None:
    with pytest.raises(RequestError) as caught:
        parse(parameters)
    assert str(caught.value.param).partition("[")[0] == next(iter(parameters))


@pytest.mark.parametrize("inputs", [None, "", 1, ["Hi"]])
def test_inputs(inputs: object) -> None:
    with pytest.raises(RequestError) as caught:
        tgi.parse({"inputs": inputs, "parameters": {}}, stream=True)
    assert caught.value.param == "inputs"
    with pytest.raises(RequestError, match="`inputs`"):
        tgi.parse({}, stream=True)


def test_unknown_fields_are_named_on_both_levels() -> None:
    assert parse({"watermark": False, "b": 1}, a=1).ignored == ("a", "b")


@pytest.mark.parametrize(
    ("name", "wanted", "harmless"),
    [
        ("adapter_id", "lora", None),
        ("best_of", 2, 1),
        ("decoder_input_details", True, False),
        ("grammar", {"type": "regex", "value": "a"}, None),
        ("top_n_tokens", 1, 0),
        ("typical_p", 0.5, 1.0),
        ("watermark", True, False),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, wanted: object, harmless: object) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse({name: wanted})
    assert caught.value.param == name
    assert parse({name: harmless}) == parse({})


def test_which_route_decides_about_streaming() -> None:
    body: JsonBody = {"inputs": "Hi", "stream": True}
    assert tgi.parse(body, stream=None).stream
    assert not tgi.parse({"inputs": "Hi"}, stream=None).stream
    assert not tgi.parse(body, stream=False).stream
    assert tgi.parse({"inputs": "Hi", "stream": False}, stream=True).stream


@pytest.mark.parametrize(
    ("default", "given", "shown"), [(True, None, True), (True, False, False), (False, None, False), (False, True, True)]
)
def test_the_full_text(default: bool, given: bool | None, shown: bool) -> None:
    body: JsonBody = {"inputs": "Hi", "parameters": {"return_full_text": given}}
    view = tgi.parse(body, stream=False, full_text_by_default=default).view
    answer = json.loads(view.open(facts()).whole(STREAMS["plain"]))
    assert answer == {"generated_text": (facts().prompt_text if shown else "") + " the river"}


@pytest.mark.parametrize("failed", ["error", "cancelled", "interrupted", "refused"])
@pytest.mark.parametrize("view", ["tgi", "chat", "completion", "native", "plain"])
def test_no_whole_answer_of_a_stream_that_failed(view: str, failed: str) -> None:
    encoder = VIEWS[view].open(facts())
    with pytest.raises(TailraceError) as caught:
        encoder.whole(STREAMS[failed])
    end = STREAMS[failed][-1]
    assert isinstance(end, End)
    assert caught.value.code == (end.failure.code if end.failure else "cancelled")


@pytest.mark.parametrize(
    ("error", "status", "text", "kind"),
    [
        (RequestError("m"), 422, "Input validation error: m", "validation"),
        (UnsupportedParameter("m"), 422, "Input validation error: m", "validation"),
        (UnsupportedMediaType("m"), 415, "Input validation error: m", "validation"),
        (QueueFull("m"), 429, "Model is overloaded", "overloaded"),
        (Draining("m"), 503, "Model is overloaded", "overloaded"),
        (EngineLost("m"), 424, "Request failed during generation: m", "generation"),
        (SequenceFailed("m"), 424, "Request failed during generation: m", "generation"),
        (UnknownStream("m"), 404, "m", "unknown_stream"),
    ],
)
def test_errors(error: TailraceError, status: int, text: str, kind: str) -> None:
    shown, body = tgi.encode_error(error)
    assert shown == status
    assert body == f'{{"error":"{text}","error_type":"{kind}"}}'.encode()


def test_an_error_is_ascii_whatever_it_says() -> None:
    end = End("error", Usage(1, 0), Failure("sequence_failed", "\u2028\u00df\n"))
    event = VIEWS["tgi"].open(facts()).encode(1, end)
    assert event.isascii()
    assert event.count(b"\n") == 2


def test_info_has_the_names_of_tgi_in_their_order() -> None:
    shown = json.loads(tgi.encode_info(model="m", max_requests=7, max_total_tokens=100, version="1.2"))
    assert list(shown) == [
        *("model_id", "model_sha", "model_pipeline_tag", "max_concurrent_requests", "max_best_of"),
        *("max_stop_sequences", "max_input_tokens", "max_total_tokens", "validation_workers"),
        *("max_client_batch_size", "router", "version", "sha", "docker_label"),
    ]
    assert (shown["model_id"], shown["max_concurrent_requests"], shown["version"]) == ("m", 7, "1.2")
    assert shown["max_input_tokens"] == shown["max_total_tokens"] - 1 == 99
