"""How large a request may be, by the scopes of its key, at a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.api.own_keys import key_of
from tests.api.process import Server
from tests.http.wire import Wire

_SMALL = 2**16
_LARGE = 2_000_000
_COUNT = "/v1/messages/count_tokens"  # needs the scope read
_JSON = b'{"model": "default", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}'
_SCOPES = {"reader": ("read",), "writer": ("generate", "read"), "admin": ("admin", "generate")}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, str]]]:
    """A server, and a key of each kind."""
    database = f"sqlite:///{tmp_path_factory.mktemp('sizes') / 'records.sqlite'}"
    keys = {name: key_of(database, name, *scopes) for name, scopes in _SCOPES.items()}
    server = Server("scripted", "--database", database).wait_ready()
    yield server, keys
    server.close()


def _status(server: Server, key: str, path: str, num_bytes: int) -> int:
    """Send a body of this size, JSON and then spaces."""
    with Wire(server.port) as wire:
        wire.send("POST", path, _JSON.ljust(num_bytes), {"authorization": f"Bearer {key}"})
        return wire.head()


@pytest.mark.parametrize(
    ("who", "path", "most_bytes", "status"),
    [
        ("reader", _COUNT, _SMALL, 200),
        ("writer", _COUNT, _LARGE, 200),
        ("writer", "/v1/messages", _LARGE, 200),
        ("admin", "/v1/admin/keys", _SMALL, 400),  # the body is read, and is not that of a key
    ],
)
def test_the_largest_body(
    keyed: tuple[Server, dict[str, str]], who: str, path: str, most_bytes: int, status: int
) -> None:
    server, keys = keyed
    assert _status(server, keys[who], path, most_bytes) == status
    assert _status(server, keys[who], path, most_bytes + 1) == 413


def test_without_a_key_the_body_is_not_read(keyed: tuple[Server, dict[str, str]]) -> None:
    server, _ = keyed
    with Wire(server.port) as wire:
        wire.send("POST", _COUNT, headers={"content-type": "application/json", "content-length": str(_SMALL)})
        assert wire.head() == 401  # although no byte of the body was sent


@pytest.mark.parametrize("who", ["reader", "writer", "nobody"])
def test_the_largest_headers_are_the_same_for_all_keys(keyed: tuple[Server, dict[str, str]], who: str) -> None:
    server, keys = keyed
    for num_bytes, refused in ((30_000, False), (33_000, True)):
        with Wire(server.port) as wire:
            wire.send("GET", "/v1/models", headers={"x-api-key": keys.get(who, "none"), "x-more": "x" * num_bytes})
            assert wire.head() == (431 if refused else 401 if who == "nobody" else 200)
