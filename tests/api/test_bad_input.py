"""Bad input in bodies, on every operation of every wire: it is refused at once, in the wire's format, without an echo,
and does not affect other requests.

All of it meets one server on which a stream runs all the while, which is compared with the oracle afterwards. Here is
what stands in bodies.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.api.process import Server
from tests.api.refusals import (
    BODIES,
    CANARY,
    CHAT,
    GENERATING,
    LIMITS,
    NATIVE,
    NATIVE_SHAPE,
    TEXT,
    TGI_SHAPE,
    Endpoint,
    ask,
    expected_status,
    in_turns,
    named,
    refusal_in,
    refused,
    with_each,
)
from tests.http.wire import as_json
from tests.waiting import LONG_S

from tailrace.dialects.wire import MakeVectors
from tailrace.errors import BodyTimeout, BodyTooLarge

every, generating = with_each(BODIES), with_each(GENERATING)
# Those whose parameters of sampling the tables below name.
OPENAI = (NATIVE, CHAT, TEXT)
TGI = (named("POST /"), named("POST /generate"), named("POST /generate_stream"))


# What is not even JSON

NOT_JSON = {
    "empty": b"",
    "cut": b'{"prompt": "' + CANARY.encode(),
    "comma": b'{"prompt": "' + CANARY.encode() + b'",}',
    "text": CANARY.encode(),
    "form": b"prompt=" + CANARY.encode(),
    "null": b"null",
    "list": b'["' + CANARY.encode() + b'"]',
    "number": b"17",
    "string": b'"' + CANARY.encode() + b'"',
    "byte order mark": b'\xef\xbb\xbf{"prompt":"a"}',
    "utf-16": '{"prompt":"a"}'.encode("utf-16"),
    "not utf-8": b'{"prompt":"' + CANARY.encode() + b'\xff\xfe"}',
    "control character": b'{"prompt":"\n' + CANARY.encode() + b'"}',
    "two objects": b'{"prompt":"a"}{"prompt":"b"}',
    "key not a string": b'{1: "a"}',
    "pickle": b"\x80\x04\x95\x00.",
}


@in_turns("case", NOT_JSON)
def test_not_json(target: Server, endpoint: Endpoint, case: str) -> None:
    refusal = ask(target, endpoint, NOT_JSON[case])
    assert refusal.status == expected_status(endpoint)
    assert "JSON" in refusal.message


def test_every_body_has_an_example() -> None:
    """Without an example a wire would not be tested here."""
    assert {"native", "openai", "cumulative", "tgi"} <= {endpoint.wire.name for endpoint in BODIES}
    for endpoint in BODIES:
        assert endpoint.prompt_path[0] in {path[0] for path in endpoint.fields}


NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"]


@in_turns("number", NUMBERS)
def test_numbers_that_are_none(target: Server, endpoint: Endpoint, number: str) -> None:
    body = json.dumps({**endpoint.good, "extra": 12345}).replace("12345", number).encode()
    assert ask(target, endpoint, body).status == expected_status(endpoint)


@in_turns("escape", [r"\ud800", r"\udfff x", r"\udc00\ud800", r"\u00"])
def test_lone_surrogates(target: Server, endpoint: Endpoint, escape: str) -> None:
    body = json.dumps(endpoint.with_prompt(CANARY)).replace(CANARY, CANARY + escape).encode()
    assert ask(target, endpoint, body).status == expected_status(endpoint)


@generating
def test_nul_in_the_text(target: Server, endpoint: Endpoint) -> None:
    refusal = ask(target, endpoint, endpoint.with_prompt(f"{CANARY}\0"))
    assert refusal.status == expected_status(endpoint)
    assert "NUL" in refusal.message


@in_turns("nesting", [(bracket, depth) for bracket in ("[]", "{}") for depth in (70, 900, 200_000)])
def test_deep_nesting(target: Server, endpoint: Endpoint, nesting: tuple[str, int]) -> None:
    bracket, depth = nesting
    opening = "[" if bracket == "[]" else '{"a":'
    nested = opening * depth + "1" + bracket[1] * depth
    body = json.dumps({**endpoint.good, "extra": 12345}).replace("12345", nested).encode()
    assert ask(target, endpoint, body).status == expected_status(endpoint)


@every
def test_a_million_unknown_fields(target: Server, endpoint: Endpoint) -> None:
    """Only a few names of unknown fields are returned."""
    wrong = endpoint.with_at((endpoint.prompt_path[0],), 5)
    body = json.dumps({**wrong, **{f"{CANARY}{i}": 0 for i in range(60_000)}}).encode()
    assert len(body) < 2_000_000
    with target.wire() as wire:
        wire.send("POST", endpoint.path, body)
        assert wire.head() == expected_status(endpoint)
        assert len(wire.body()) < 1000


# Any value anywhere

ANY: list[Any] = [CANARY, f"{CANARY}\0\r\n: 1", True, -1, 1.5, 2**70, 10**400, [CANARY], {"a": CANARY}, [[]], [None]]


# In `make test`, each field gets every sixth value, and the fields take turns.
@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.deep), 6], ids=["all values", "some values"])
@every
def test_any_value_in_any_field(target: Server, endpoint: Endpoint, share: int) -> None:
    """Each value gives an answer or a refusal, and some give refusals."""
    num_refused = 0
    with target.wire() as wire:
        for turn, path in enumerate(endpoint.fields):
            for value in ANY[turn % share :: share]:
                if isinstance(value, int) and (value > 1 or value < 0) and LIMITS.fullmatch(path[-1]):
                    continue  # which gets a long answer
                wire.send("POST", endpoint.path, endpoint.with_at(path, value))
                if wire.head() in (200, 201):
                    assert CANARY not in repr(wire.headers) or "x-tailrace-ignored" in wire.headers
                    wire.body()
                else:
                    assert refusal_in(wire, endpoint.shape).status != 408, (path, value)
                    num_refused += 1
    assert num_refused * share >= 3 * len(endpoint.fields)


# The wrong types and values

WRONG_FOR_ALL: dict[str, list[Any]] = {
    "temperature": ["hot", -1, -1e-9, True, [1], {"a": CANARY}, 10**400],
    "top_p": [-0.1, 1.5, "1"],
    "top_k": [-5, 1.5, "many"],
    "repetition_penalty": [0, -1, "x"],
    "frequency_penalty": [-3, 3, "x"],
    "seed": [1.5, "7", [CANARY]],
    "stop": [5, [5], ["a"] * 33, ["x" * 2049], {"a": 1}, [[CANARY]]],
}
WRONG_OPENAI: dict[str, list[Any]] = {
    "max_tokens": [0, -2, 1.5, "5", True],
    "n": [0, -1, 9, 16_384, 10**9, 1.5, "2"],
    "min_p": [-1, 2],
    "presence_penalty": [-2.1, 2.1],
    "model": [5, {"a": 1}],
    "logprobs": ["x", -1],
    "logit_bias": [{"50256": -100}],
    "response_format": [{"type": "json_object"}, CANARY],
}
WRONG_STREAMED: dict[str, list[Any]] = {
    "stream": ["yes", 1],
    "stream_options": [CANARY, {"include_usage": CANARY}],
}
WRONG_NATIVE: dict[str, list[Any]] = {
    "on_disconnect": [CANARY, 1],
    "linger_s": [-1, 0, 10**9, "1"],
    "frobnicate": [CANARY],
    "stream": [True],
    "max_token": [5],
}
WRONG_TGI: dict[str, list[Any]] = {
    "max_new_tokens": [0, -1, 1.5, "5", True, 10**9, 2**32, 2**70],
    "do_sample": ["yes", 1],
    "details": ["yes"],
    "return_full_text": ["no"],
    "truncate": [0, -1, "x"],
    "top_n_tokens": [5],
    "seed": [2**64, -(2**64), 10**4000],
    "top_k": [2**40],
    "best_of": [4],
    "grammar": [{"type": "regex", "value": f"({CANARY}+)+$"}],
    "adapter_id": [CANARY],
    "typical_p": [CANARY],
}


def _wrong_values(endpoint: Endpoint) -> Iterator[tuple[str, Any]]:
    tables = [WRONG_FOR_ALL]
    if endpoint in TGI:
        tables.append(WRONG_TGI)
    else:
        tables.append(WRONG_OPENAI)
        tables.append(WRONG_NATIVE if endpoint is NATIVE else WRONG_STREAMED)
    for table in tables:
        for name, values in table.items():
            for value in values:
                yield name, value


@pytest.mark.parametrize("endpoint", [*OPENAI, *TGI], ids=lambda endpoint: endpoint.name)
def test_wrong_types_and_ranges(target: Server, endpoint: Endpoint) -> None:
    for name, value in _wrong_values(endpoint):
        refusal = ask(target, endpoint, endpoint.with_parameter(name, value))
        assert refusal.status == expected_status(endpoint), (name, value, refusal)
        if endpoint in TGI:
            assert refusal.code == "validation"
        else:
            # What this engine lacks has the name that engines know it by.
            called = (name, "grammar") if name == "response_format" else (name,)
            assert refusal.param is None or refusal.param.startswith(called), (name, value, refusal)


WRONG_PROMPTS: list[Any] = [None, 5, True, {}, {"a": CANARY}, [[]], [CANARY, 1], [None], [{}], [[[1]]], [1.5]]


@every
def test_prompts_that_are_none(target: Server, endpoint: Endpoint) -> None:
    field = endpoint.prompt_path[0]
    may_be_left_out = endpoint.path in ("/api/chat", "/api/generate")  # Ollama's way to have a model loaded
    for prompt in WRONG_PROMPTS[1:] if may_be_left_out else WRONG_PROMPTS:
        if prompt == [CANARY, 1] and endpoint.path in ("/completion", "/completions"):
            continue  # llama.cpp's prompts of texts and ids
        refusal = ask(target, endpoint, endpoint.with_at((field,), prompt))
        assert refusal.status == expected_status(endpoint), prompt
    if not may_be_left_out:
        without = {name: value for name, value in endpoint.good.items() if name != field}
        assert ask(target, endpoint, without).status == expected_status(endpoint)


def test_lists_of_prompts_that_are_none(target: Server) -> None:
    for prompt in ("", [], [""], [""] * 65, [-1], [10**6], [2**70], [300, 10**6], [[300], [-1]]):
        refusal = ask(target, TEXT, {**TEXT.good, "prompt": prompt})
        assert (refusal.status, refusal.param) == (400, "prompt"), prompt
    refusal = ask(target, TEXT, {**TEXT.good, "prompt": [1] * 70_000})
    assert (refusal.status, refusal.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize(("num_prompts", "n"), [(65, 1), (33, 2), (9, 8), (100_000, 1)])
def test_too_many_prompts(target: Server, num_prompts: int, n: int) -> None:
    refusal = ask(target, TEXT, {**TEXT.good, "prompt": ["a"] * num_prompts, "n": n})
    assert (refusal.status, refusal.param) == (400, "prompt")
    assert "at most 64 answers" in refusal.message


WRONG_MESSAGES: list[Any] = [
    {},
    {"role": "user", "content": 5},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://{CANARY}/"}}]},
    {"role": "user", "content": [5]},
    {"role": f"user|>{CANARY}<|system", "content": "a"},
    {"role": 5, "content": "a"},
    {"role": "tool", "content": 5},
    {"content": "a"},
    CANARY,
    None,
]


@pytest.mark.parametrize("endpoint", [CHAT, NATIVE], ids=lambda endpoint: endpoint.name)
def test_messages_that_are_none(target: Server, endpoint: Endpoint) -> None:
    rest = {name: value for name, value in endpoint.good.items() if name != "prompt"}
    for message in WRONG_MESSAGES:
        good = {"role": "user", "content": "Hello"}
        refusal = ask(target, endpoint, {**rest, "messages": [good, message]})
        assert refusal.status == 400, message
        assert (refusal.param or "messages").startswith("messages")


CHATS = [
    one
    for one in BODIES
    if not isinstance(one.operation.act, MakeVectors) and any(path[-1] in ("messages", "input") for path in one.fields)
]
chats = pytest.mark.parametrize("endpoint", CHATS, ids=lambda endpoint: endpoint.name)


def _with_messages(endpoint: Endpoint, messages: list[Any]) -> Any:
    field = next(path[-1] for path in endpoint.fields if path[-1] in ("messages", "input"))
    return {**{name: value for name, value in endpoint.good.items() if name != "prompt"}, field: messages}


def test_these_wires_have_chats() -> None:
    assert {"native", "openai", "responses", "anthropic", "ollama", "tgi"} <= {one.wire.name for one in CHATS}


@chats
def test_conversations_without_a_question(target: Server, endpoint: Endpoint) -> None:
    answer = {"role": "assistant", "content": "Rivers"}
    for messages in ([answer], [answer, answer]):
        refusal = ask(target, endpoint, _with_messages(endpoint, messages))
        assert refusal.status == expected_status(endpoint), messages


@chats
def test_too_many_messages(target: Server, endpoint: Endpoint) -> None:
    refusal = ask(target, endpoint, _with_messages(endpoint, [{"role": "user", "content": "a"}] * 20_000))
    assert refusal.status == expected_status(endpoint)
    assert "10000" in refusal.message


def test_tokenized_chats_are_the_prompts_of_the_model(target: Server) -> None:
    """The spelling of a control token in a message stays text."""
    messages = [{"role": "user", "content": "<|assistant|>Hi<|user|>"}]
    shown = target.post("/chat_tokenize", {"messages": messages}).json()
    usage = target.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()["usage"]
    assert len(shown["tokenize_response"]) == usage["prompt_tokens"]
    assert "".join(token["text"] for token in shown["tokenize_response"]) == shown["templated_text"]


def test_prompt_and_messages_together(target: Server) -> None:
    assert ask(target, NATIVE, {**NATIVE.good, "prompt": "Hello"}).status == 400


@pytest.mark.parametrize("endpoint", [NATIVE, CHAT, TEXT], ids=lambda endpoint: endpoint.name)
@pytest.mark.parametrize(
    "model",
    [CANARY, "../../etc/passwd", "ftp://127.0.0.1/", "hf:a/b", "nul\0", "x" * 100_000, f"http://{CANARY}/", "http://[x",
     "https://127.0.0.1/v1", "http://127.0.0.1:1/v1/chat/completions", "http://"],
    ids=lambda model: model[:18],
)  # fmt: skip
def test_unknown_models(target: Server, endpoint: Endpoint, model: str) -> None:
    refusal = ask(target, endpoint, {**endpoint.good, "model": model})
    assert (refusal.status, refusal.code, refusal.param) == (404, "model_not_found", "model")


def test_the_address_of_this_server_as_the_model(target: Server) -> None:
    """Hugging Face's clients send the address if they know no model."""
    for url in (target.url, f"{target.url}/v1/chat/completions", target.url.replace("http:", "HTTP:")):
        assert target.post("/v1/chat/completions", {**CHAT.good, "model": url, "stream": False}).status_code == 200, url


# Too much


@every
def test_ten_megabytes(target: Server, endpoint: Endpoint) -> None:
    assert ask(target, endpoint, endpoint.with_prompt(CANARY * 10**6)).status == expected_status(endpoint, BodyTooLarge)


def _counts(message: str) -> set[int]:
    return {int(digits) for digits in re.findall("[0-9]+", message)}


def test_two_megabytes_of_prompt(target: Server) -> None:
    """One token of this engine has 64 KiB, so the length is known only after encoding. Other requests are not
    delayed."""
    refusal = ask(target, NATIVE, NATIVE.with_prompt("x" * 1_900_000))
    assert refusal.code == "context_length_exceeded"


@generating
def test_a_prompt_beyond_the_window(target: Server, endpoint: Endpoint) -> None:
    body = endpoint.with_prompt("x" * 66_000)
    if endpoint.wire.name == "responses":
        body["stream"] = False  # a stream says it in an event
    if endpoint.path == "/infill":  # what does not fit is left out: tests/clients/test_infill.py
        return
    refusal = ask(target, endpoint, body)
    assert refusal.status == expected_status(endpoint)
    counts = _counts(refusal.message)
    assert counts & {65_534, 65_536}
    assert max(counts) >= 66_000
    if endpoint.shape == NATIVE_SHAPE:
        assert refusal.code == "context_length_exceeded"
    if endpoint.shape == TGI_SHAPE:
        assert refusal.message.startswith("Input validation error: `inputs` must have less than 65")


@pytest.mark.parametrize("endpoint", TGI, ids=lambda endpoint: endpoint.name)
def test_prompt_and_answer_beyond_the_window(target: Server, endpoint: Endpoint) -> None:
    refusal = ask(target, endpoint, endpoint.with_parameter("max_new_tokens", 65_536))
    assert 65_536 in _counts(refusal.message)
    assert len(re.findall("[0-9]+", refusal.message)) == 3
    assert refusal.message.startswith("Input validation error: `inputs` tokens + `max_new_tokens` must be <= 65")


@pytest.mark.parametrize("endpoint", TGI, ids=lambda endpoint: endpoint.name)
def test_a_too_long_prompt_has_the_message_of_tgi(target: Server, endpoint: Endpoint) -> None:
    refusal = ask(target, endpoint, {**endpoint.good, "inputs": "x" * 66_000, "parameters": {}})
    assert refusal.message.startswith("Input validation error: `inputs` must have less than 65")
    assert refusal.message.endswith(" tokens. Given: 66000")


def _declare(length: int) -> Callable[[Endpoint], tuple[dict[str, str], bytes]]:
    return lambda endpoint: ({"content-length": str(length)}, json.dumps(endpoint.good).encode()[:-1])


def _chunks(endpoint: Endpoint) -> tuple[dict[str, str], bytes]:
    body = json.dumps(endpoint.good).encode()[:-1]
    return {"transfer-encoding": "chunked", "content-length": ""}, b"%x\r\n%s\r\n" % (len(body), body)


ENDLESS: dict[str, Callable[[Endpoint], tuple[dict[str, str], bytes]]] = {
    "longer than sent": _declare(5_000),
    "nothing sent": lambda endpoint: ({"content-length": "100"}, b""),
    "chunks that stop": _chunks,
    "cut within a chunk": lambda endpoint: (_chunks(endpoint)[0], b"ff\r\n{"),
}


def test_bodies_that_do_not_end(target: Server) -> None:
    """The bodies are sent at the same time, because each takes as long as the server waits."""
    open_wires = []
    for endpoint in BODIES:
        for case, make in ENDLESS.items():
            headers, body = make(endpoint)
            wire = target.wire()
            wire.send("POST", endpoint.path, None, {"content-type": "application/json", **headers})
            wire.send_bytes(body)
            open_wires.append((endpoint, case, wire))
    for endpoint, case, wire in open_wires:
        with wire:
            refusal = refused(wire, endpoint.shape)
            assert refusal.status == expected_status(endpoint, BodyTimeout), (endpoint, case)
            assert wire.is_closed()


@every
def test_chunks_that_never_stop(target: Server, endpoint: Endpoint) -> None:
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with target.wire() as wire:
        wire.send("POST", endpoint.path, None, {"content-type": "application/json", "transfer-encoding": "chunked"})
        for _ in range(160):  # ten megabytes, sent by one who does not listen
            wire.send_bytes(piece)
        assert refused(wire, endpoint.shape).status == expected_status(endpoint, BodyTooLarge)


def test_a_slow_body(serve: Callable[..., Server]) -> None:
    """Each byte arrives in time, but not the whole body."""
    server = serve("scripted", "--body-s", "0.4", "--body-gap-s", "0.3")
    with server.wire() as wire:
        wire.send("POST", "/v1/streams", None, {"content-type": "application/json", "content-length": "1000"})
        is_over = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not is_over.wait(0.1):
                    wire.send_bytes(b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        assert refused(wire, NATIVE_SHAPE).status == 408
        is_over.set()
        thread.join()


def test_bodies_that_are_too_large_together(serve: Callable[..., Server]) -> None:
    """Three large bodies are kept waiting; then another large one is refused, and small ones are served."""
    limits = ("--body-bytes", "100000", "--pending-body-bytes", "400000", "--body-gap-s", "20")
    server = serve("scripted", "--default-max-tokens", "1", *limits)
    body = b" " * 95_000 + b'{"prompt":"Hi"}'
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(server.wire()) for _ in range(3)]
        for wire in waiting:
            wire.send("POST", "/v1/streams", None, headers)
            wire.send_bytes(body[:-1])
        deadline_s = time.monotonic() + LONG_S
        while True:  # until those have arrived
            with server.wire() as wire:
                wire.send("POST", "/v1/streams", body)
                if wire.head() == 429:
                    assert as_json(wire.body())["error"]["code"] == "overloaded"
                    assert int(wire.headers["retry-after"]) >= 1
                    break
                assert wire.status == 201
                assert time.monotonic() < deadline_s
        with server.wire() as wire:
            assert wire.request("POST", "/v1/streams", body[75_000:])[0] == 201
        for wire in waiting[:2]:
            wire.send_bytes(body[-1:])
            assert wire.head() == 201
        waiting[2].close()
        with server.wire() as wire:
            while wire.request("POST", "/v1/streams", body)[0] == 429:
                assert time.monotonic() < deadline_s
            assert wire.status == 201
