"""Bad input, on every wire: refused at once, in the wire's own shape, without an echo, and nobody else notices.

All of it meets one server on which a stream runs all the while, which is compared with the oracle afterwards.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.server.oracle import Answer
from tests.server.process import Server
from tests.server.wire import Wire, as_json, sse_data

CANARY = "kanarie7f3a"
_BOUND_S = 3.0  # catches what hangs; how long it really takes is a matter for bench
_GAP_S = 1.0  # the same, for the stream beside it


@dataclass(frozen=True)
class Endpoint:
    """A wire, with a body it takes and the shape of its refusals."""

    name: str
    path: str
    good: dict[str, Any]  # Any: of JSON
    shape: str
    prompt: str = "prompt"  # the field that has the text, "messages" where it is in one

    def with_prompt(self, text: Any) -> dict[str, Any]:
        if self.prompt == "messages":
            return {**self.good, "messages": [{"role": "user", "content": text}]}
        return {**self.good, self.prompt: text}

    def with_parameter(self, name: str, value: Any) -> dict[str, Any]:
        if self.shape == "tgi":
            return {**self.good, "parameters": {**self.good["parameters"], name: value}}
        return {**self.good, name: value}


_TGI = {"inputs": "Hello", "parameters": {"max_new_tokens": 1}}
NATIVE = Endpoint("native", "/v1/streams", {"prompt": "Hello", "max_tokens": 1}, "openai")
CHAT = Endpoint(
    "chat",
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "stream": True},
    "openai",
    "messages",
)
TEXT = Endpoint("text", "/v1/completions", {"prompt": "Hello", "max_tokens": 1}, "openai")
ROOT = Endpoint("tgi", "/", {**_TGI, "stream": True}, "tgi", "inputs")
GENERATE = Endpoint("generate", "/generate", _TGI, "tgi", "inputs")
GENERATE_STREAM = Endpoint("generate-stream", "/generate_stream", _TGI, "tgi", "inputs")
PLAIN = Endpoint("plain", "/?prompt=Hello&max_tokens=1", {}, "openai")
JSON_ENDPOINTS = (NATIVE, CHAT, TEXT, ROOT, GENERATE, GENERATE_STREAM)
every = pytest.mark.parametrize("endpoint", JSON_ENDPOINTS, ids=lambda endpoint: endpoint.name)


@dataclass
class Witness:
    """Follows one long stream, and notes when each piece came."""

    server: Server
    stream_id: str
    arrivals_s: list[float] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)

    def follow(self, begun: threading.Event) -> None:
        with self.server.wire() as wire:
            wire.send("GET", f"/v1/streams/{self.stream_id}/events")
            wire.head()
            while piece := wire.chunk():
                self.arrivals_s.append(time.monotonic())
                self.body += piece
                begun.set()

    @property
    def longest_gap_s(self) -> float:
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return max(later - earlier for earlier, later in pairs)


@pytest.fixture(scope="module")
def target() -> Iterator[Server]:
    """The server that all of this is thrown at. It is checked at the end."""
    with contextlib.closing(Server("scripted:tokens_per_s=200")) as server:
        server.wait_ready()
        prompt, seed = "Never mind them.", 9
        stream_id = server.create({"prompt": prompt, "max_tokens": 50_000, "seed": seed})
        witness, begun = Witness(server, stream_id), threading.Event()
        thread = threading.Thread(target=witness.follow, args=(begun,))
        thread.start()
        assert begun.wait(10)
        yield server
        server.http.delete(f"/v1/streams/{stream_id}")
        thread.join(10)
        assert CANARY not in server.log
    *deltas, end = sse_data(bytes(witness.body))
    assert as_json(end)["status"] == "cancelled"
    assert len(deltas) > 10
    assert bytes(witness.body).startswith(b"".join(Answer(prompt, 50_000, seed).native(stream_id)[: len(deltas)]))
    assert witness.longest_gap_s < _GAP_S


@dataclass(frozen=True)
class Refusal:
    status: int
    message: str
    code: str  # or TGI's error_type
    param: str | None
    headers: dict[str, str]


def _refused(wire: Wire, shape: str) -> Refusal:
    """Reads an answer and holds it to what every refusal promises."""
    status, body = wire.head(), wire.body()
    assert 400 <= status < 500, (status, body)
    assert wire.headers["content-type"] == "application/json"
    assert wire.headers["content-length"] == str(len(body))
    assert wire.headers["x-request-id"]
    assert len(body) < 1000
    assert CANARY.encode() not in body
    assert CANARY not in repr(wire.headers)
    found = as_json(body)
    if shape == "tgi":
        assert set(found) == {"error", "error_type"}
        return Refusal(status, found["error"], found["error_type"], None, wire.headers)
    assert set(found) == {"error"}
    error = found["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["message"]
    assert error["code"]
    return Refusal(status, error["message"], error["code"], error["param"], wire.headers)


def _ask(
    server: Server, endpoint: Endpoint, body: object = None, headers: dict[str, str] | None = None, path: str = ""
) -> Refusal:
    """POSTs, and expects a refusal within the bound; a good request on the same connection is then served."""
    with server.wire() as wire:
        started_s = time.monotonic()
        wire.send("POST", path or endpoint.path, body, headers)
        refusal = _refused(wire, endpoint.shape)
        assert time.monotonic() - started_s < _BOUND_S
        if refusal.headers.get("connection") == "close":
            assert wire.is_closed()
            return refusal
        wire.send("POST", endpoint.path, endpoint.good or None)
        assert wire.head() in (200, 201)
        wire.body()
    return refusal


def _expected(endpoint: Endpoint, status: int = 400) -> int:
    """TGI says 422 where the others say 400."""
    return 422 if endpoint.shape == "tgi" and status == 400 else status


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


@every
@pytest.mark.parametrize("case", NOT_JSON)
def test_not_json(target: Server, endpoint: Endpoint, case: str) -> None:
    refusal = _ask(target, endpoint, NOT_JSON[case])
    assert refusal.status == _expected(endpoint)
    assert "JSON" in refusal.message


NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"]


@every
@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_that_are_none(target: Server, endpoint: Endpoint, number: str) -> None:
    body = json.dumps(endpoint.with_parameter("temperature", 12345)).replace("12345", number).encode()
    assert _ask(target, endpoint, body).status == _expected(endpoint)


@every
@pytest.mark.parametrize("escape", [r"\ud800", r"\udfff x", r"\udc00\ud800", r"\u00"])
def test_lone_surrogates(target: Server, endpoint: Endpoint, escape: str) -> None:
    body = json.dumps(endpoint.with_prompt(CANARY)).replace(CANARY, CANARY + escape).encode()
    assert _ask(target, endpoint, body).status == _expected(endpoint)


@every
def test_nul_in_the_text(target: Server, endpoint: Endpoint) -> None:
    refusal = _ask(target, endpoint, endpoint.with_prompt(f"{CANARY}\0"))
    assert refusal.status == _expected(endpoint)
    assert "NUL" in refusal.message


@every
@pytest.mark.parametrize("depth", [70, 900, 200_000])
@pytest.mark.parametrize("bracket", ["[]", "{}"])
def test_deep_nesting(target: Server, endpoint: Endpoint, depth: int, bracket: str) -> None:
    opening = "[" if bracket == "[]" else '{"a":'
    nested = opening * depth + "1" + bracket[1] * depth
    body = json.dumps(endpoint.with_parameter("extra", 12345)).replace("12345", nested).encode()
    assert _ask(target, endpoint, body).status == _expected(endpoint)


@every
def test_a_million_unknown_fields(target: Server, endpoint: Endpoint) -> None:
    body = json.dumps({**endpoint.with_prompt(5), **{f"{CANARY}{i}": 0 for i in range(60_000)}}).encode()
    assert len(body) < 2_000_000
    with target.wire() as wire:  # native names an unknown field, so that a typing mistake is seen
        wire.send("POST", endpoint.path, body)
        assert wire.head() == _expected(endpoint)
        assert len(wire.body()) < 1000


# The wrong types and values

WRONG_FOR_ALL: dict[str, list[Any]] = {
    "temperature": ["hot", -1, -1e-9, True, [1], {"a": CANARY}, 10**400],
    "top_p": [-0.1, 1.5, "1", 0],
    "top_k": [-5, 1.5, 2**40, "many"],
    "repetition_penalty": [0, -1, "x"],
    "frequency_penalty": [-3, 3, "x"],
    "seed": [2**64, -(2**64), 1.5, "7", 10**4000],
    "stop": [5, [5], ["a", "b", "c", "d", "e"], [""], ["x" * 2000], {"a": 1}, [[CANARY]]],
}
WRONG_OPENAI: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.5, "5", True, 10**9, 2**31, 2**70, 10**4000],
    "n": [0, -1, 9, 16_384, 10**9, 1.5, "2"],
    "min_p": [-1, 2],
    "presence_penalty": [-2.1, 2.1],
    "model": [5, {"a": 1}],
    "logprobs": ["x", -1],
    "logit_bias": [{"50256": -100}],
    "tools": [[{"type": "function", "function": {"name": CANARY}}]],
    "response_format": [{"type": "json_object"}, CANARY],
}
WRONG_STREAMED: dict[str, list[Any]] = {
    "stream": ["yes", 1],
    "stream_options": [CANARY, {"include_usage": CANARY}],
    "top_logprobs": [5],
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
    "best_of": [4],
    "grammar": [{"type": "regex", "value": f"({CANARY}+)+$"}],
    "adapter_id": [CANARY],
    "watermark": [True],
    "typical_p": [0.5],
}


def _wrong_values(endpoint: Endpoint) -> Iterator[tuple[str, Any]]:
    tables = [WRONG_FOR_ALL]
    if endpoint.shape == "tgi":
        tables.append(WRONG_TGI)
    else:
        tables.append(WRONG_OPENAI)
        tables.append(WRONG_NATIVE if endpoint is NATIVE else WRONG_STREAMED)
    for table in tables:
        for name, values in table.items():
            for value in values:
                yield name, value


@every
def test_wrong_types_and_ranges(target: Server, endpoint: Endpoint) -> None:
    for name, value in _wrong_values(endpoint):
        refusal = _ask(target, endpoint, endpoint.with_parameter(name, value))
        assert refusal.status == _expected(endpoint), (name, value, refusal)
        if endpoint.shape == "tgi":
            assert refusal.code == "validation"
        else:
            assert refusal.param is None or refusal.param.startswith(name), (name, value, refusal)


WRONG_PROMPTS: list[Any] = ["", None, 5, True, {}, {"a": CANARY}, [], [[]], [CANARY, CANARY], [1, 2, 3], [None]]


@every
def test_prompts_that_are_none(target: Server, endpoint: Endpoint) -> None:
    for prompt in WRONG_PROMPTS:
        body = {**endpoint.good, endpoint.prompt: prompt}
        assert _ask(target, endpoint, body).status == _expected(endpoint), prompt
    without = {name: value for name, value in endpoint.good.items() if name != endpoint.prompt}
    assert _ask(target, endpoint, without).status == _expected(endpoint)


WRONG_MESSAGES: list[Any] = [
    {},
    {"role": "user", "content": 5},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://{CANARY}/"}}]},
    {"role": "user", "content": [5]},
    {"role": f"user|>{CANARY}<|system", "content": "a"},
    {"role": 5, "content": "a"},
    {"role": "tool", "content": "a"},
    {"content": "a"},
    CANARY,
    None,
]


@pytest.mark.parametrize("endpoint", [CHAT, NATIVE], ids=lambda endpoint: endpoint.name)
def test_messages_that_are_none(target: Server, endpoint: Endpoint) -> None:
    rest = {name: value for name, value in endpoint.good.items() if name != "prompt"}
    for message in WRONG_MESSAGES:
        good = {"role": "user", "content": "Hello"}
        refusal = _ask(target, endpoint, {**rest, "messages": [good, message]})
        assert refusal.status == 400, message
        assert (refusal.param or "messages").startswith("messages")


def test_prompt_and_messages_together(target: Server) -> None:
    assert _ask(target, NATIVE, {**NATIVE.good, "messages": CHAT.good["messages"]}).status == 400


def test_stream_options_without_a_stream(target: Server) -> None:
    body = {**TEXT.good, "stream_options": {"include_usage": True}}
    assert _ask(target, TEXT, body).param == "stream_options"


@pytest.mark.parametrize("endpoint", [NATIVE, CHAT, TEXT], ids=lambda endpoint: endpoint.name)
@pytest.mark.parametrize(
    "model", [CANARY, "../../etc/passwd", "http://127.0.0.1/", "hf:a/b", "nul\0", "x" * 100_000], ids=lambda m: m[:8]
)
def test_unknown_models(target: Server, endpoint: Endpoint, model: str) -> None:
    refusal = _ask(target, endpoint, {**endpoint.good, "model": model})
    assert (refusal.status, refusal.code, refusal.param) == (404, "model_not_found", "model")


# Too much


@every
def test_ten_megabytes(target: Server, endpoint: Endpoint) -> None:
    assert _ask(target, endpoint, endpoint.with_prompt(CANARY * 10**6)).status == 413


@every
@pytest.mark.parametrize("characters", [66_000, 1_900_000])
def test_a_prompt_beyond_the_window(target: Server, endpoint: Endpoint, characters: int) -> None:
    refusal = _ask(target, endpoint, endpoint.with_prompt("x" * characters))
    assert refusal.status == _expected(endpoint)
    counts = [int(word) for word in refusal.message.replace(",", " ").split() if word.isdigit()]
    assert counts[-1] in (65_534, 65_536)
    assert counts[0] > 65_536 or refusal.message.startswith("at least")
    if endpoint.shape == "openai":
        assert refusal.code == "context_length_exceeded"


@every
def test_prompt_and_answer_beyond_the_window(target: Server, endpoint: Endpoint) -> None:
    name = "max_new_tokens" if endpoint.shape == "tgi" else "max_tokens"
    refusal = _ask(target, endpoint, endpoint.with_parameter(name, 65_536))
    assert "65536" in refusal.message
    counts = [int(word) for word in refusal.message.replace(",", " ").split() if word.isdigit()]
    assert len(counts) == 3


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
    """All at once, as each of them takes as long as the server is willing to wait."""
    open_wires = []
    started_s = time.monotonic()
    for endpoint in JSON_ENDPOINTS:
        for case, make in ENDLESS.items():
            headers, body = make(endpoint)
            wire = target.wire()
            wire.send("POST", endpoint.path, None, {"content-type": "application/json", **headers})
            wire.send_bytes(body)
            open_wires.append((endpoint, case, wire))
    for endpoint, case, wire in open_wires:
        with wire:
            refusal = _refused(wire, endpoint.shape)
            assert refusal.status == 408, (endpoint, case)
            assert wire.is_closed()
    assert time.monotonic() - started_s < _BOUND_S + 1


@every
def test_chunks_that_never_stop(target: Server, endpoint: Endpoint) -> None:
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with target.wire() as wire:
        wire.send("POST", endpoint.path, None, {"content-type": "application/json", "transfer-encoding": "chunked"})
        for _ in range(160):  # ten megabytes, sent by one who does not listen
            wire.send_bytes(piece)
        assert _refused(wire, endpoint.shape).status == 413


def test_a_body_that_drips(serve: Callable[..., Server]) -> None:
    """Each byte comes in time, and the whole does not. All wires share the reader of bodies."""
    server = serve("scripted", "--body-s", "0.4", "--body-gap-s", "0.3")
    with server.wire() as wire:
        wire.send("POST", "/v1/streams", None, {"content-type": "application/json", "content-length": "1000"})
        refused = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not refused.wait(0.1):
                    wire.send_bytes(b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        assert _refused(wire, "openai").status == 408
        refused.set()
        thread.join()


# Headers, hosts and origins


@every
@pytest.mark.parametrize(
    "kind",
    ["text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json", "text/json"],
)
def test_content_types_other_than_json(target: Server, endpoint: Endpoint, kind: str) -> None:
    refusal = _ask(target, endpoint, json.dumps(endpoint.with_prompt(CANARY)).encode(), {"content-type": kind})
    assert refusal.status == 415


EVERYWHERE = [
    *((endpoint.name, "POST", endpoint.path, endpoint.shape) for endpoint in (*JSON_ENDPOINTS, PLAIN)),
    ("models", "GET", "/v1/models", "openai"),
    ("model", "GET", "/v1/models/scripted", "openai"),
    ("state", "GET", "/v1/streams/x", "openai"),
    ("events", "GET", "/v1/streams/x/events", "openai"),
    ("cancel", "POST", "/v1/streams/x/cancel", "openai"),
    ("delete", "DELETE", "/v1/streams/x", "openai"),
    ("health", "GET", "/health", "tgi"),
    ("info", "GET", "/info", "tgi"),
    ("nowhere", "GET", "/nowhere", "openai"),
]
FORBIDDEN: dict[str, dict[str, str]] = {
    "name": {"host": f"{CANARY}.example"},
    "name with port": {"host": f"{CANARY}.example:8000"},
    "name that begins right": {"host": f"localhost.{CANARY}.example"},
    "other address": {"host": "192.0.2.1"},
    "garbage": {"host": f"[{CANARY}"},
    "none": {"host": ""},
    "foreign origin": {"origin": f"http://{CANARY}.example"},
    "null origin": {"origin": "null"},
    "origin that begins right": {"origin": f"http://localhost.{CANARY}.example"},
    "origin of another port": {"origin": "http://127.0.0.1:1"},
}


@pytest.mark.parametrize(("name", "method", "path", "shape"), EVERYWHERE, ids=lambda value: value)
def test_hosts_and_origins_that_are_not_ours(target: Server, name: str, method: str, path: str, shape: str) -> None:
    for case, headers in FORBIDDEN.items():
        with target.wire() as wire:
            wire.send(method, path, None, headers)
            assert _refused(wire, shape).status == 403, case


def test_two_hosts(target: Server) -> None:
    with target.wire() as wire:
        wire.send_bytes(f"GET /v1/models HTTP/1.1\r\nhost: {CANARY}.example\r\nhost: localhost\r\n\r\n".encode())
        assert _refused(wire, "openai").status == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:80", "a.localhost"])
def test_names_that_are_ours(target: Server, host: str) -> None:
    with target.wire() as wire:
        assert wire.request("GET", "/v1/models", None, {"host": host})[0] == 200


def test_an_origin_of_ours(target: Server) -> None:
    with target.wire() as wire:
        assert wire.request("GET", "/v1/models", None, {"origin": target.url})[0] == 200


@pytest.fixture(scope="module")
def known() -> Iterator[Server]:
    """A server with names and friends."""
    flags = ("--allowed-hosts", "one.test, TWO.test", "--allowed-origins", "http://page.test")
    with contextlib.closing(Server("scripted", *flags)) as server:
        yield server.wait_ready()


def test_names_that_were_allowed(known: Server) -> None:
    for host in ("one.test", "two.test:80"):
        with known.wire() as wire:
            assert wire.request("GET", "/v1/models", None, {"host": host})[0] == 200
    with known.wire() as wire:
        wire.send("GET", "/v1/models", None, {"host": "three.test"})
        assert _refused(wire, "openai").status == 403


def test_a_page_that_was_allowed_reads_answers_and_refusals(known: Server) -> None:
    origin = {"origin": "http://page.test"}
    for method, path, body, status in [
        ("GET", "/v1/models", None, 200),
        ("POST", "/v1/streams", NATIVE.good, 201),
        ("POST", "/v1/streams", {"prompt": ""}, 400),
        ("GET", "/nowhere", None, 404),
        ("PUT", "/v1/streams", None, 405),
    ]:
        with known.wire() as wire:
            assert wire.request(method, path, body, origin)[0] == status
            assert wire.headers["access-control-allow-origin"] == "http://page.test"
            assert "x-stream-id" in wire.headers["access-control-expose-headers"]
    with known.wire() as wire:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "idempotency-key"}
        assert wire.request("OPTIONS", "/v1/streams", None, {**origin, **asked})[0] == 200
        assert "POST" in wire.headers["access-control-allow-methods"]
    with known.wire() as wire:
        wire.send("POST", "/v1/streams", NATIVE.good, {"origin": f"http://{CANARY}.test"})
        assert _refused(wire, "openai").status == 403
        assert "access-control-allow-origin" not in wire.headers


@pytest.mark.parametrize("key", ["", "two words", "x" * 256, "Käse", "tab\there"], ids=lambda key: key[:5] or "empty")
def test_idempotency_keys_that_are_none(target: Server, key: str) -> None:
    with target.wire() as wire:
        body = json.dumps(NATIVE.good)
        head = (
            f"POST /v1/streams HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nidempotency-key: {key}"
        )
        wire.send_bytes(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode("latin-1"))
        refusal = _refused(wire, "openai")
    assert (refusal.status, refusal.param) == (400, "idempotency-key")


CURSORS = ["0", "-1", "abc", "1.5", "x-", f"{CANARY}-", f"{CANARY}-x", f"{CANARY}-1e3", "a b-1", "x" * 5000, "ä-1"]


def test_cursors_that_are_none(target: Server) -> None:
    """On a repeated POST, where a bare number says nothing."""
    for cursor in CURSORS:
        assert _ask(target, NATIVE, NATIVE.good, {"last-event-id": cursor}).status == 400, cursor
    assert _ask(target, NATIVE, NATIVE.good, {"last-event-id": f"{'C' * 22}-1"}).status == 404


STREAM_IDS = ["x", CANARY, "..", "%2e%2e", "a%2fb", "%00", "x" * 5000, "%0a", "%ff", "A" * 22, "'%20OR%201=1"]


@pytest.mark.parametrize(("method", "suffix"), [("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("DELETE", "")])
def test_streams_that_are_not_there(target: Server, method: str, suffix: str) -> None:
    for stream_id in STREAM_IDS:
        with target.wire() as wire:
            wire.send(method, f"/v1/streams/{stream_id}{suffix}", None)
            assert _refused(wire, "openai").status == 404, stream_id


# Methods and paths


@pytest.mark.parametrize(("name", "good", "path", "shape"), EVERYWHERE[:-1], ids=lambda value: value)
def test_wrong_methods(target: Server, name: str, good: str, path: str, shape: str) -> None:
    for method in ("PUT", "PATCH", "OPTIONS", "TRACE", "PROPFIND"):
        with target.wire() as wire:
            wire.send(method, path, None)
            refusal = _refused(wire, shape)
            assert refusal.status == 405
            assert good in refusal.headers["allow"] or path in ("/", PLAIN.path, "/v1/streams/x")


@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        f"/{CANARY}",
        "/v1",
        "/v1/",
        "/v1/streams/",
        "/v1/chat",
        "/v1/models/",
        f"/v1/models/{CANARY}",
        "/v1/models/../../etc/passwd",
        "//",
        "/%2e%2e/etc/passwd",
        "/generate/",
        "/docs",
        "/openapi.json",
        "/metrics/x",
    ],
)
def test_unknown_paths(target: Server, path: str) -> None:
    with target.wire() as wire:
        wire.send("GET", path)
        assert _refused(wire, "openai").status == 404


# Plain


@pytest.mark.parametrize(
    "query",
    [
        "prompt=",
        "prompt",
        f"prompt=a&max_tokens={CANARY}",
        "prompt=a&max_tokens=0",
        "prompt=a&max_tokens=-1",
        "prompt=a&max_tokens=1.5",
        "prompt=a&max_tokens=1e3",
        "prompt=a&max_tokens=",
        "prompt=a&max_tokens=99999999999999999999",
        "prompt=a&max_tokens=65536",
        "prompt=a&max_tokens=%D9%A3",
        f"prompt=a&{CANARY}=1",
        "prompt=%00",
        "prompt=" + "x" * 60_000 + "&max_tokens=10000",
    ],
    ids=lambda query: query[:40],
)
def test_plain_queries_that_are_none(target: Server, query: str) -> None:
    assert _ask(target, PLAIN, None, path=f"/?{query}").status == 400


def test_plain_does_not_read_a_body(target: Server) -> None:
    """Whatever is sent beside the query, the connection is in order afterwards."""
    with target.wire() as wire:
        for _ in range(2):
            wire.send("POST", "/?prompt=a&max_tokens=1", b"ignored")
            assert wire.head() == 200
            assert wire.body()
