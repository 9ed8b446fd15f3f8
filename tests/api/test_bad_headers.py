"""Bad input in headers, paths and queries."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest
from tests.api.process import Server
from tests.api.refusals import (
    BODIES,
    CANARY,
    EVERYTHING,
    NATIVE,
    NATIVE_SHAPE,
    PLAIN,
    Endpoint,
    Names,
    ask,
    in_turns,
    named,
    refused,
    with_each,
)

every = with_each(BODIES)


# Headers, hosts and origins


@in_turns(
    "kind",
    ["text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json", "text/json"],
)
def test_content_types_other_than_json(target: Server, endpoint: Endpoint, kind: str) -> None:
    headers = {"content-type": kind}
    if not kind or kind.endswith("urlencoded"):
        headers["sec-fetch-site"] = "same-origin"  # a browser's; without it, it is a client, which two wires listen to
    refusal = ask(target, endpoint, json.dumps(endpoint.with_prompt(CANARY)).encode(), headers)
    assert refusal.status == 415


ENCODINGS = [
    {"content-type": "application/json; charset=utf-7"},
    {"content-type": 'application/json; a=b; Charset="UTF-16"'},
    {"content-type": "application/json;charset=iso-8859-1"},
    {"content-encoding": "gzip"},
    {"content-encoding": "identity, br"},
    {"content-type": "application/json", "content-encoding": "deflate"},
]


@every
def test_encoded_bodies_are_refused(target: Server, endpoint: Endpoint) -> None:
    for headers in ENCODINGS:
        assert ask(target, endpoint, endpoint.good, headers).status == 415, headers


@pytest.mark.parametrize("charset", ["utf-8", "UTF8", '"utf-8"', "us-ascii"])
def test_names_of_the_charset_utf_8(target: Server, charset: str) -> None:
    with target.wire() as wire:
        kind = {"content-type": f"application/json; charset={charset}", "content-encoding": "identity"}
        assert wire.request("POST", "/v1/streams", NATIVE.good, kind)[0] == 201


@pytest.mark.parametrize(
    "endpoint", [one for one in BODIES if one.wire.name in ("ollama", "triton")], ids=lambda one: one.name
)
@pytest.mark.parametrize(
    "headers", [{}, {"content-type": "application/x-www-form-urlencoded"}], ids=["nothing", "curl"]
)
def test_variants_of_the_json_type_are_accepted(target: Server, endpoint: Endpoint, headers: dict[str, str]) -> None:
    with target.wire() as wire:
        wire.send(endpoint.operation.method, endpoint.path, json.dumps(endpoint.good).encode(), headers)
        assert wire.head() in endpoint.served


EVERYWHERE = [
    *((one.name, one.operation.method, one.path, one.headers, one.shape) for one in EVERYTHING),
    ("nowhere", "GET", "/nowhere", {}, NATIVE_SHAPE),
]
FORBIDDEN: dict[str, dict[str, str]] = {
    "name": {"host": f"{CANARY}.example"},
    "name with port": {"host": f"{CANARY}.example:8000"},
    "name that begins right": {"host": f"localhost.{CANARY}.example"},
    "other address": {"host": "192.0.2.1"},
    "path": {"host": f"localhost/{CANARY}.example"},
    "user": {"host": f"{CANARY}@localhost"},
    "query": {"host": f"localhost?{CANARY}"},
    "port": {"host": "localhost:999999"},
    "port that is none": {"host": "localhost:x"},
    "garbage": {"host": f"[{CANARY}"},
    "none": {"host": ""},
    "foreign origin": {"origin": f"http://{CANARY}.example"},
    "null origin": {"origin": "null"},
    "malformed origin": {"origin": "http://["},
    "origin that begins right": {"origin": f"http://localhost.{CANARY}.example"},
    "origin of another port": {"origin": "http://127.0.0.1:1"},
}


@pytest.mark.parametrize(
    ("name", "method", "path", "sent", "shape"), EVERYWHERE, ids=[entry[0] for entry in EVERYWHERE]
)
def test_foreign_hosts_and_origins(
    target: Server, name: str, method: str, path: str, sent: dict[str, str], shape: Names
) -> None:
    for case, headers in FORBIDDEN.items():
        with target.wire() as wire:
            wire.send(method, path, None, sent | headers)
            assert refused(wire, shape).status == 403, case


def test_two_hosts(target: Server) -> None:
    with target.wire() as wire:
        wire.send_bytes(f"GET /v1/models HTTP/1.1\r\nhost: {CANARY}.example\r\nhost: localhost\r\n\r\n".encode())
        assert refused(wire, NATIVE_SHAPE).status == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:80", "a.localhost"])
def test_own_names(target: Server, host: str) -> None:
    with target.wire() as wire:
        assert wire.request("GET", "/v1/models", None, {"host": host})[0] == 200


def test_an_own_origin(target: Server) -> None:
    with target.wire() as wire:
        assert wire.request("GET", "/v1/models", None, {"origin": target.url})[0] == 200


@pytest.fixture(scope="module")
def known() -> Iterator[Server]:
    """A server with allowed hosts and origins."""
    flags = ("--allowed-hosts", "one.test, TWO.test", "--allowed-origins", "http://page.test")
    with contextlib.closing(Server("scripted", *flags)) as server:
        yield server.wait_ready()


def test_allowed_names(known: Server) -> None:
    for host in ("one.test", "two.test:80"):
        with known.wire() as wire:
            assert wire.request("GET", "/v1/models", None, {"host": host})[0] == 200
    with known.wire() as wire:
        wire.send("GET", "/v1/models", None, {"host": "three.test"})
        assert refused(wire, NATIVE_SHAPE).status == 403


def test_an_allowed_page_reads_answers_and_refusals(known: Server) -> None:
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
        theirs = "idempotency-key, x-api-key, x-stainless-lang"  # what official clients send from a page
        asked = {"access-control-request-method": "POST", "access-control-request-headers": theirs}
        assert wire.request("OPTIONS", "/v1/streams", None, {**origin, **asked})[0] == 200
        assert "POST" in wire.headers["access-control-allow-methods"]
    with known.wire() as wire:
        wire.send("POST", "/v1/streams", NATIVE.good, {"origin": f"http://{CANARY}.test"})
        assert refused(wire, NATIVE_SHAPE).status == 403
        assert "access-control-allow-origin" not in wire.headers


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "same-origin", "referer": "http://other.test/"}, True),
        ({"referer": "http://localhost/page"}, True),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site"}, False),
        ({"referer": "http://other.test/"}, False),
        ({"referer": "http://localhost.other.test/"}, False),
        ({"referer": "nonsense"}, False),
        ({"referer": "http://[x"}, False),
        ({"referer": "http://[::1]:x/"}, False),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_pages_of_other_origins_cannot_generate(
    target: Server, method: str, headers: dict[str, str], is_let_in: bool
) -> None:
    with target.wire() as wire:
        wire.send(method, "/query-stream/?query=Hi&max_tokens=1", None, {"host": "localhost", **headers})
        assert wire.head() == (200 if is_let_in else 403)


@pytest.mark.parametrize("key", ["", "two words", "x" * 256, "Käse", "tab\there"], ids=lambda key: key[:5] or "empty")
def test_idempotency_keys_that_are_none(target: Server, key: str) -> None:
    with target.wire() as wire:
        body = json.dumps(NATIVE.good)
        head = (
            f"POST /v1/streams HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nidempotency-key: {key}"
        )
        wire.send_bytes(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode("latin-1"))
        refusal = refused(wire, NATIVE_SHAPE)
    assert (refusal.status, refusal.param) == (400, "idempotency-key")


CURSORS = ["0", "-1", "abc", "1.5", "x-", f"{CANARY}-", f"{CANARY}-x", f"{CANARY}-1e3", "a b-1", "x" * 5000, "ä-1"]


def test_invalid_cursors(target: Server) -> None:
    """On a repeated POST, a number without a stream id is not a position."""
    for cursor in CURSORS:
        assert ask(target, NATIVE, NATIVE.good, {"last-event-id": cursor}).status == 400, cursor
    assert ask(target, NATIVE, NATIVE.good, {"last-event-id": f"{'C' * 22}-1"}).status == 404


STREAM_IDS = ["x", CANARY, "..", "%2e%2e", "a%2fb", "%00", "x" * 5000, "%0a", "%ff", "A" * 22, "'%20OR%201=1"]


@pytest.mark.parametrize(("method", "suffix"), [("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("DELETE", "")])
def test_unknown_streams(target: Server, method: str, suffix: str) -> None:
    for stream_id in STREAM_IDS:
        with target.wire() as wire:
            wire.send(method, f"/v1/streams/{stream_id}{suffix}", None)
            assert refused(wire, NATIVE_SHAPE).status == 404, stream_id


# Methods and paths


@pytest.mark.parametrize(
    ("name", "good", "path", "sent", "shape"), EVERYWHERE[:-1], ids=[entry[0] for entry in EVERYWHERE[:-1]]
)
def test_wrong_methods(target: Server, name: str, good: str, path: str, sent: dict[str, str], shape: Names) -> None:
    for method in ("PUT", "PATCH", "OPTIONS", "TRACE", "PROPFIND"):
        with target.wire() as wire:
            wire.send(method, path, None, sent)
            refusal = refused(wire, shape)
            assert refusal.status == 405
            here = {one.operation.method for one in EVERYTHING if one.path.partition("?")[0] == path.partition("?")[0]}
            assert here <= set(refusal.headers["allow"].split(", ")), good


@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        f"/{CANARY}",
        "/v1",
        "/v1/",
        "/v1/chat",
        f"/v1/models/{CANARY}",
        "/v1/models/../../etc/passwd",
        "//",
        "/%2e%2e/etc/passwd",
        "/docs/x",
        "/metrics/x",
    ],
)
def test_unknown_paths(target: Server, path: str) -> None:
    with target.wire() as wire:
        wire.send("GET", path)
        assert refused(wire, NATIVE_SHAPE).status == 404


@pytest.mark.parametrize("path", [f"/v1/models/{CANARY}", "/v1/models/a/b", "/v1/messages/x"])
def test_unknown_paths_of_anthropics_clients(target: Server, path: str) -> None:
    with target.wire() as wire:
        wire.send("GET", path, None, {"anthropic-version": "2023-06-01"})
        assert refused(wire, named("POST /v1/messages").shape).status == 404


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=1001",
        f"limit={CANARY}",
        f"after_id={CANARY}",
        "before_id=",
        "before_id=default",
        "after_id=scripted&before_id=scripted",
    ],
)
def test_pages_of_models_that_cannot_be(target: Server, query: str) -> None:
    assert ask(target, named("GET /v1/models?"), path=f"/v1/models?{query}").status == 400


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
        "prompt=a&max_tokens=%D9%A3",
        "prompt=%00",
    ],
    ids=lambda query: query[:40],
)
def test_invalid_plain_queries(target: Server, query: str) -> None:
    assert ask(target, PLAIN, None, path=f"/?{query}").status == 400


def test_plain_does_not_read_a_body(target: Server) -> None:
    """A body has no effect, and the connection can be used again."""
    with target.wire() as wire:
        for _ in range(2):
            wire.send("POST", "/?prompt=a&max_tokens=1", b"ignored")
            assert wire.head() == 200
            assert wire.body()
