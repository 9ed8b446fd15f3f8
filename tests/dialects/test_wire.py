"""Any body becomes a call or a refusal without an echo."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.dialects.fake_server import chat, completion, generate, native, parsed
from tests.examples import examples

from tailrace.dialects import GenerateCall
from tailrace.dialects.bodies import JsonBody, read_json, to_json
from tailrace.dialects.wire import failure_of
from tailrace.errors import RequestError
from tailrace.types import NO_LIMIT, End, Failure, Sampling, Usage
from tailrace_plugins.tgi import tgi_wire as tgi

STARTS: dict[str, JsonBody] = {
    "native": {"prompt": "Hi"},
    "chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "completion": {"prompt": "Hi"},
    "tgi": {"inputs": "Hi"},
    "tgi_root": {"inputs": "Hi"},
}
OPENAI_NAMED = ("native", "chat", "completion")  # wires that name the sampling parameters alike

CANARY = "Xyzzy"  # stands in for what a client would not want to find in somebody's log


def refusal(read: Callable[[], object]) -> str | None:
    """Return the text of a refusal, or None. It may contain the name of an unknown field."""
    try:
        read()
    except RequestError as error:
        return error.message.replace(f"Unknown field: {CANARY}.", "") + str(error.param).removeprefix(CANARY)
    return None


PARSERS: dict[str, Callable[[JsonBody], GenerateCall]] = {
    "native": native,
    "chat": chat,
    "completion": completion,
    "tgi": generate,
    "tgi_root": lambda body: tgi.parse_root(parsed(body)),
}

# Bodies


def test_a_body_is_read() -> None:
    assert read_json(b' {"a": [1, 2.5, "\\u00e9\xc3\xa9", null, true], "b": {}}\n') == {
        "a": [1, 2.5, "éé", None, True],
        "b": {},
    }


def test_of_duplicate_names_the_last_counts() -> None:
    assert read_json(b'{"a": 1, "a": 2}') == {"a": 2}


def test_an_escaped_surrogate_pair_is_one_character() -> None:
    assert read_json(b'{"a": "\\ud83c\\udf0a"}') == {"a": "\U0001f30a"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"\0",
        b"{",
        b"{}{}",
        b"{}\0",
        b"[]",
        b"null",
        b'"a"',
        b"1",
        b"\xef\xbb\xbf{}",
        b"{'a': 1}",
        b'{"a": 1,}',
        b'{"a": 1} // no comment',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": -1e999}',
        b'{"a": 01}',
        b'{"a": "\n"}',
        b'{"a": "\0"}',
        b'{"a": "\xff"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\\ud800"}',
        b'{"a": "\\udc00"}',
        b'{"a": "\\ud800\\u0041"}',
        b'{"\\ud800": 1}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"a": ' + b"[" * 1_000_000,
        b'{"a": ' * 200_000 + b"1" + b"}" * 200_000,
        '{"a": 1}'.encode("utf-16"),
        '{"a": 1}'.encode("utf-32-le"),
    ],
    ids=lambda body: body[:24].decode("latin-1") + f"…{len(body)}",
)
def test_invalid_json_objects_are_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read_json(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")


def test_nesting_is_limited_but_usual_bodies_pass() -> None:
    assert read_json(b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}")
    with pytest.raises(RequestError, match="nested too deeply"):
        read_json(b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}")


@given(st.binary(max_size=200))
@example(b'{"a":"' + CANARY.encode() + b"\xff")
def test_any_bytes_are_json_or_refused(body: bytes) -> None:
    try:
        value = read_json(body)
    except RequestError:
        return
    assert value == json.loads(body)


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_no_refusal_of_a_body_repeats_it(before: bytes, after: bytes) -> None:
    assert CANARY not in (refusal(lambda: read_json(before + CANARY.encode() + after)) or "")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_json_is_written_in_ascii_and_read_back(value: object) -> None:
    written = to_json({"a": value} if not _has_big_integer(value) else {"a": None})
    assert written.isascii()
    assert b"\n" not in written
    if not _has_big_integer(value):
        assert json.loads(written) == {"a": value}


def _has_big_integer(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_big_integer, value.values()))
    if isinstance(value, list):
        return any(map(_has_big_integer, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**63


# Calls

KNOWN = sorted(
    {
        *("model", "prompt", "messages", "inputs", "parameters", "stream", "stream_options", "user", "linger_s"),
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("seed", "max_tokens", "max_completion_tokens", "stop", "ignore_eos", "n", "logprobs", "on_disconnect"),
        *("do_sample", "max_new_tokens", "return_full_text", "truncate", "details", "role", "content", "type", "text"),
        *("include_usage", "best_of", "tools", "grammar", "typical_p", "echo", "response_format", CANARY),
    }
)
canaries = st.sampled_from([CANARY, [CANARY], {CANARY: CANARY}, {"type": CANARY}, {"role": CANARY, "content": CANARY}])
chats = st.just([{"role": "user", "content": "Hi"}])
fields = st.dictionaries(
    st.sampled_from(KNOWN),
    json_values | canaries | chats | st.dictionaries(st.sampled_from(KNOWN), json_values | canaries, max_size=6),
    max_size=8,
)
bodies = st.builds(
    lambda start, given: {**start, **given},
    st.sampled_from([{}, {"prompt": "Hi"}, {"inputs": "Hi"}, {"messages": [{"role": "user", "content": "Hi"}]}]),
    fields,
)


@settings(max_examples=examples(40), deadline=None)
@pytest.mark.parametrize("wire", PARSERS)
@given(body=bodies)
def test_any_body_is_a_call_or_refused_without_an_echo(wire: str, body: JsonBody) -> None:
    message = refusal(lambda: PARSERS[wire](body))
    if message is not None:
        assert CANARY not in message
        return
    call = PARSERS[wire](body)
    assert bool(call.request.prompts) != bool(call.request.messages) or call.request.prompts == ("",)
    sampling = call.request.sampling
    assert 0 <= sampling.temperature <= 100
    assert 0 < sampling.top_p <= 1
    assert sampling.top_k >= 0
    assert sampling.max_tokens is None or 1 <= sampling.max_tokens < 2**32
    assert sampling.seed is None or -(2**63) <= sampling.seed < 2**64  # what the way to the engine can carry
    assert len(sampling.stop) <= 32
    assert all(sampling.stop)


@pytest.mark.parametrize("wire", PARSERS)
def test_a_field_of_a_wrong_type_is_refused_without_an_echo(wire: str) -> None:
    wrong = (CANARY, [CANARY], {CANARY: CANARY}, [{"role": CANARY, "content": [{"type": CANARY}]}])
    found = []
    for name in KNOWN:
        for value in wrong:
            found.append(refusal(partial(PARSERS[wire], {**STARTS[wire], name: value})))
            found.append(refusal(partial(PARSERS[wire], {"inputs": "Hi", "parameters": {name: value}})))
    refusals = [text for text in found if text is not None]
    assert len(refusals) > len(KNOWN)
    assert not any(CANARY in text for text in refusals)


# What clients meet most


@pytest.mark.parametrize("wire", OPENAI_NAMED)
@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("temperature", 0, 2),
        ("min_p", 0, 1),
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2, 2),
        ("n", 1, 1024),
    ],
)
def test_ranges(wire: str, name: str, least: int, most: int) -> None:
    parse = PARSERS[wire]
    for good in (least, most, None):
        parse({**STARTS[wire], name: good})
    wrong: list[object] = [least - 1, most + 1, 10**30, -(10**30), "1", [], {}, True]
    for bad in wrong:
        with pytest.raises(RequestError) as caught:
            parse({**STARTS[wire], name: bad})
        assert caught.value.param == name


@pytest.mark.parametrize("wire", OPENAI_NAMED)
@pytest.mark.parametrize(("name", "most"), [("typical_p", 1), ("repetition_penalty", 100)])
def test_ranges_without_their_minimum(wire: str, name: str, most: float) -> None:
    parse = PARSERS[wire]
    for good in (0.001, most, None):
        parse({**STARTS[wire], name: good})
    for bad in (0, -1, most + 0.001, "1", True):
        with pytest.raises(RequestError) as caught:
            parse({**STARTS[wire], name: bad})
        assert caught.value.param == name


@pytest.mark.parametrize("wire", OPENAI_NAMED)
def test_numbers_beyond_what_there_is(wire: str) -> None:
    def sampling(**given: object) -> Sampling:
        return PARSERS[wire]({**STARTS[wire], **given}).request.sampling

    plain = sampling()
    for name in ("max_tokens", "max_completion_tokens"):
        assert sampling(**{name: 10**30}).max_tokens == NO_LIMIT
        assert sampling(**{name: -1}).max_tokens == NO_LIMIT
        wrongs: tuple[object, ...] = (0, -2, 1.5, "1", True, [], {})
        for wrong in wrongs:
            with pytest.raises(RequestError) as caught:
                sampling(**{name: wrong})
            assert caught.value.param == name
    assert sampling(top_k=-1) == sampling(top_k=10**30) == plain
    assert sampling(top_k=1_000_000).top_k == 1_000_000
    assert sampling(top_p=0).temperature == 0  # nothing but the likeliest token
    for seed in (0, -5, 2**63 - 1, -(2**63)):
        assert sampling(seed=seed).seed == seed
    for huge in (2**64 - 1, 10**30, -(10**30), 2.0**64):
        assert sampling(seed=huge).seed == int(huge) % 2**63


@pytest.mark.parametrize("wire", OPENAI_NAMED)
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "top_k", "seed", "n"])
def test_whole_numbers_may_have_a_fraction_of_zero(wire: str, name: str) -> None:
    """Go, Lua and JavaScript write them so."""
    assert PARSERS[wire]({**STARTS[wire], name: 4.0}) == PARSERS[wire]({**STARTS[wire], name: 4})
    for wrong in (4.5, "4.0", 1e400):
        with pytest.raises(RequestError) as caught:
            PARSERS[wire]({**STARTS[wire], name: wrong})
        assert caught.value.param == name


@pytest.mark.parametrize("wire", OPENAI_NAMED)
def test_every_field_arrives(wire: str) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.5,
        "frequency_penalty": 1.25,
        "seed": -9,
        "max_tokens": 11,
        "stop": ["a", "b"],
        "ignore_eos": True,
        "n": 3,
        "model": "m",
    }
    request = PARSERS[wire]({**STARTS[wire], **given}).request
    shown = {name: getattr(request.sampling, name) for name in given if name != "model"}
    assert {**shown, "stop": list(shown["stop"]), "model": request.model} == given


@pytest.mark.parametrize("wire", OPENAI_NAMED)
def test_nulls_mean_absent(wire: str) -> None:
    names = (
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("seed", "max_tokens", "max_completion_tokens", "stop", "ignore_eos", "n", "logprobs", "model"),
        *("tools", "best_of", "response_format", "logit_bias", "top_logprobs"),
    )
    nulls: dict[str, object] = dict.fromkeys(names)
    assert PARSERS[wire]({**STARTS[wire], **nulls}) == PARSERS[wire](STARTS[wire])


@pytest.mark.parametrize("wire", OPENAI_NAMED)
def test_greedy_sampling_drops_parameters_without_effect(wire: str) -> None:
    greedy = {"temperature": 0, "top_p": 0.5, "top_k": 5, "min_p": 0.5}
    assert PARSERS[wire]({**STARTS[wire], **greedy}) == PARSERS[wire]({**STARTS[wire], "temperature": 0})
    assert PARSERS[wire]({**STARTS[wire], "top_k": -1}).request.sampling.top_k == 0


@pytest.mark.parametrize("wire", OPENAI_NAMED)
def test_the_newer_name_of_max_tokens_is_preferred(wire: str) -> None:
    both = {"max_tokens": 5, "max_completion_tokens": 6}
    assert PARSERS[wire]({**STARTS[wire], **both}).request.sampling.max_tokens == 6


@pytest.mark.parametrize("wire", OPENAI_NAMED)
def test_stop_strings_in_every_form(wire: str) -> None:
    def stop(value: object) -> tuple[str, ...]:
        return PARSERS[wire]({**STARTS[wire], "stop": value}).request.sampling.stop

    assert stop("a") == ("a",)
    assert stop([]) == stop(None) == ()
    assert stop("") == stop([""]) == stop(["", ""]) == ()
    assert stop(["a", "", "b", "é" * 256]) == ("a", "b", "é" * 256)
    assert stop([f"zz{number}" for number in range(32)]) == tuple(f"zz{number}" for number in range(32))
    for wrong in (["a"] * 33, "a" * 257, ["a" * 250] * 9, [1], {"a": 1}, 1):
        with pytest.raises(RequestError) as caught:
            stop(wrong)
        assert str(caught.value.param).partition("[")[0] == "stop"


@pytest.mark.parametrize(
    ("code", "status", "retry_after_s"),
    [
        ("engine_unavailable", 503, 1.0),
        ("poison_request", 422, None),
        ("log_full", 507, None),
        ("journal_unavailable", 503, 1.0),
        ("diverged", 500, None),
        ("interrupted", 503, 1.0),
        ("queue_timeout", 429, 1.0),
        ("request_refused", 400, None),
        ("sequence_failed", 500, None),
    ],
)
def test_the_error_of_a_failed_stream(code: str, status: int, retry_after_s: float | None) -> None:
    error = failure_of(End("error", Usage(1, 0), Failure(code, "why")))
    assert (error.code, error.status, error.message, error.retry_after_s) == (code, status, "why", retry_after_s)


def test_the_error_of_a_cancelled_stream() -> None:
    for end in (None, End("cancelled", Usage(1, 0))):
        error = failure_of(end)
        assert (error.code, error.status) == ("cancelled", 499)


def test_a_body_of_nothing_but_brackets_is_refused_unread() -> None:
    with pytest.raises(RequestError, match="too many"):
        read_json(b'{"a":[' + b"[]," * 200_000 + b"[]]}")
