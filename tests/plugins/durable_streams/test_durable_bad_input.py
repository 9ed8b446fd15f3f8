"""Bad input to durable streams: it is refused without an echo, and has no effect."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import httpx
import pytest
from tests.api.process import Server
from tests.api.refusals import CANARY
from tests.plugins.durable_streams.durable_servers import BEGINNING, JSON, KINDS, TEXT, durable_server, new_path


@pytest.fixture
def path() -> str:
    return new_path()


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest) -> Iterator[Server]:
    with contextlib.closing(durable_server(request.param)) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def door(target: Server) -> httpx.Client:
    return target.http


BAD_HEADERS = [
    ("PUT", {"content-type": CANARY}),
    ("PUT", {"content-type": f"text/plain; {'x' * 300}"}),
    ("PUT", {"stream-ttl": CANARY}),
    ("PUT", {"stream-ttl": "-1"}),
    ("PUT", {"stream-ttl": "9" * 30}),
    ("PUT", {"stream-ttl": "1", "stream-expires-at": "2050-01-01T00:00:00Z"}),
    ("PUT", {"stream-expires-at": CANARY}),
    ("PUT", {"stream-expires-at": "2050-01-01"}),
    ("PUT", {"stream-expires-at": "2050-13-01T00:00:00Z"}),
    ("PUT", {"stream-expires-at": "0001-01-01T00:00:00+23:59"}),
    ("PUT", {"stream-expires-at": "9999-12-31T23:59:59-23:59"}),
    ("PUT", {"stream-forked-from": f"/%ff{CANARY}"}),
    ("PUT", {"stream-forked-from": f"/../{CANARY}"}),
    ("PUT", {"stream-fork-offset": BEGINNING}),
    ("PUT", {"stream-forked-from": "/x", "stream-fork-sub-offset": "-1"}),
    ("POST", {"stream-seq": "\xff" + CANARY}),
    ("POST", {"stream-seq": "s" * 300}),
    ("POST", {"producer-id": CANARY}),
    ("POST", {"producer-id": "", "producer-epoch": "0", "producer-seq": "0"}),
    ("POST", {"producer-id": "p", "producer-epoch": "1e3", "producer-seq": "0"}),
    ("POST", {"producer-id": "p", "producer-epoch": "0", "producer-seq": "9007199254740992"}),
    ("POST", {"producer-id": "p", "producer-epoch": "0", "producer-seq": "9" * 5000}),
]


def refused(answer: httpx.Response, status: int = 400) -> None:
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert CANARY not in answer.text
    assert CANARY not in str(answer.headers)
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(("method", "headers"), BAD_HEADERS)
def test_bad_headers(door: httpx.Client, path: str, method: str, headers: dict[str, str]) -> None:
    if method == "POST":
        door.put(path, headers=TEXT)
    raw = [(name.encode(), value.encode("latin-1")) for name, value in ({**TEXT, **headers}).items()]
    refused(door.request(method, path, headers=raw, content=b"x"))
    if method == "PUT":
        assert door.head(path).status_code == 404


@pytest.mark.parametrize(
    "query",
    ["offset=", f"offset={CANARY}", "offset=1", "offset=a&offset=b", "offset=0,1", f"offset={BEGINNING}%00", "live=sse",
     "live=long-poll", f"offset=-1&live={CANARY}", "offset=%ff", "offset=9999999999999999_9999999999999999",
     "&".join(f"{CANARY}{n}=1" for n in range(50))],
)  # fmt: skip
def test_bad_queries(door: httpx.Client, path: str, query: str) -> None:
    door.put(path, headers=TEXT)
    refused(door.get(f"{path}?{query}"))


@pytest.mark.parametrize(
    "name",
    ["", "a//b", "a/", "%2e%2e/a", "a/%2E", "a%00b", "a%0d%0ab", "%ff", "x" * 1100, f"{CANARY}%7f"],
)  # fmt: skip
def test_bad_paths(server: Server, name: str) -> None:
    """The paths are sent unchanged; a usual client would normalise them."""
    for method in ("PUT", "GET"):
        with server.wire() as wire:
            wire.send(method, f"/v1/durable/{name}")
            assert wire.head() in (400, 404)
            assert CANARY.encode() not in wire.body()


@pytest.mark.parametrize(
    "body",
    [b"[]", b"{", b"NaN", b'"\\ud800"', b'["\xff"]', b"[1,]", b"[" * 90_000, b'{"a":' * 70 + b"1" + b"}" * 70,
     CANARY.encode(), b"1e999", b"\xef\xbb\xbf1"],
)  # fmt: skip
def test_bad_json(door: httpx.Client, path: str, body: bytes) -> None:
    door.put(path, headers=JSON)
    refused(door.post(path, headers=JSON, content=body))
    assert door.get(path).content == b"[]"


@pytest.mark.parametrize(
    "headers",
    [JSON | {"content-encoding": "gzip"}, {"content-type": "application/json; charset=utf-7"},
     TEXT | {"content-encoding": "br"}],
)  # fmt: skip
def test_encoded_bodies_are_refused(door: httpx.Client, path: str, headers: dict[str, str]) -> None:
    refused(door.put(path, headers=headers, content=b"[]"), 415)
    assert door.head(path).status_code == 404
    door.put(path, headers=JSON)
    refused(door.post(path, headers=headers, content=b"[1]"), 415)


def test_appends_that_cannot_be(door: httpx.Client, path: str) -> None:
    refused(door.post(path, headers=TEXT, content=CANARY), 404)
    door.put(path, headers=TEXT)
    refused(door.post(path, headers=TEXT), 400)
    refused(door.post(path, headers=JSON, content=b"[1]"), 409)
    refused(door.post(path, content=CANARY.encode()), 400)
    refused(door.post(path, headers=TEXT, content="x" * 2_000_001), 413)
    refused(door.get("/v1/durable/__ds/subscriptions/a"), 404)
    assert door.patch(path).status_code == 405


def test_the_total_size_is_limited(serve: Callable[..., Server]) -> None:
    door = serve("scripted", "--durable-bytes", "200000").http
    one, other, third = (f"/v1/durable/{name}" for name in ("one", "other", "third"))
    for path in (one, other):
        assert door.put(path, headers=TEXT, content="x" * 90_000).status_code == 201
    refused(door.put(third, headers=TEXT, content="z" * 90_000), 507)
    refused(door.post(one, headers=TEXT, content="z" * 90_000), 507)
    assert door.get(one).text == "x" * 90_000
    assert door.delete(other).status_code == 204
    assert door.put(third, headers=TEXT, content="z" * 90_000).status_code == 201


def test_durable_streams_can_be_switched_off(serve: Callable[..., Server]) -> None:
    assert serve("scripted", "--durable-bytes", "0").http.get("/v1/durable/a").status_code == 404
