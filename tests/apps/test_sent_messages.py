"""Answers that ASGI or HTTP does not allow cause a clear 500 and a line in the log, never a broken or split
response."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest
from tests.apps.process import Forgiving, write
from tests.waiting import LONG_S
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect

_APP = """
START, BODY = "http.response.start", "http.response.body"


def start(status=200, headers=()):
    return {"type": START, "status": status, "headers": list(headers)}


def body(content=b"hello"):
    return {"type": BODY, "body": content}


def close(code=1000, reason=""):
    return {"type": "websocket.close", "code": code, "reason": reason}


ACCEPT = {"type": "websocket.accept"}
ANSWERS = ANSWERS_OF_THE_TEST


async def app(scope, receive, send):
    if scope["type"] != "lifespan":
        await receive()
        for message in ANSWERS[scope["path"].rpartition("/")[2]]:
            await send(message)
"""

# The messages that an app sends, by name, and what its author reads. All but the last begin no answer.
_REFUSED = {
    "status-0": ("[start(0)]", "status .* from 200 to 599, not 0"),
    "status-100": ("[start(100), body()]", "from 200 to 599, not 100"),
    "status-101": ("[start(101), body()]", "from 200 to 599, not 101"),
    "status-600": ("[start(600), body()]", "from 200 to 599, not 600"),
    "status-text": ("[start('200'), body()]", "from 200 to 599, not '200'"),
    "crlf": (r"[start(headers=[(b'x-a', b'1\r\nx-injected: 2')]), body()]", "x-a contains a control character"),
    "lf": (r"[start(headers=[(b'x-a', b'1\nx-injected: 2')]), body()]", "x-a contains a control character"),
    "nul": (r"[start(headers=[(b'x-a', b'1\x002')]), body()]", "x-a contains a control character"),
    "name": (r"[start(headers=[(b'x-a: 1\r\nx-injected', b'2')]), body()]", "cannot be the name of a header"),
    "no-name": ("[start(headers=[(b'', b'2')]), body()]", "cannot be the name of a header"),
    "text-header": ("[start(headers=[('x-a', 'b')]), body()]", "a header is a pair of bytes"),
    "length-text": ("[start(headers=[(b'content-length', b'abc')]), body()]", "content-length should be one number"),
    "length-below-0": ("[start(headers=[(b'content-length', b'-1')]), body()]", "content-length should be one number"),
    "two-lengths": ("[start(headers=[(b'content-length', b'5')] * 2), body()]", "content-length should be one number"),
    "both-lengths": (
        "[start(headers=[(b'content-length', b'5'), (b'transfer-encoding', b'chunked')]), body()]",
        "transfer-encoding is set by the server",
    ),
    "body-first": ("[body()]", "'http.response.body' cannot be sent when the answer is new"),
    "unknown": ("[{'type': 'http.response.foo'}]", "'http.response.foo' cannot be sent"),
}
_CUT_OFF = {
    "too-long": ("[start(headers=[(b'content-length', b'2')]), body()]", "longer than its content-length"),
    "too-short": ("[start(headers=[(b'content-length', b'20')]), body()]", "shorter than its content-length"),
    "text-body": ("[start(), body('text')]", "the body of an answer is bytes, not str"),
    "two-starts": ("[start(), start(), body()]", "cannot be sent when the answer is started"),
}
_ALLOWED = {
    "status-599": ("[start(599), body()]", (599, "hello")),
    "chunked": ("[start(headers=[(b'transfer-encoding', b'chunked')]), body()]", (200, "hello")),
    "after-the-end": ("[start(), body(), body(b'more')]", (200, "hello")),
    "trailers": ("[start(), body(), {'type': 'http.response.trailers', 'headers': []}]", (200, "hello")),
    "no-content": ("[start(204), body()]", (204, "")),
}
_SOCKETS = {
    "code-0": ("[ACCEPT, close(0)]", "0 is not a valid close code"),
    "code-1006": ("[ACCEPT, close(1006)]", "1006 is not a valid close code"),
    "reason": ("[ACCEPT, close(1000, 'x' * 124)]", "at most 123 bytes"),
    "nothing": ("[ACCEPT, {'type': 'websocket.send'}]", "either text or bytes"),
    "number": ("[ACCEPT, {'type': 'websocket.send', 'text': 5}]", "takes text as str"),
}
_HANDSHAKES = {
    "accept-header": (r"[ACCEPT | {'headers': [(b'x-a', b'1\r\nx-b: 2')]}]", "x-a contains a control character"),
    "subprotocol": (r"[ACCEPT | {'subprotocol': 'a\r\nb'}]", "a subprotocol is a name"),
    "denial": ("[{'type': 'websocket.http.response.start', 'status': 100, 'headers': []}]", "from 200 to 599"),
}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forgiving]:
    tables = (_REFUSED, _CUT_OFF, _ALLOWED, _SOCKETS, _HANDSHAKES)
    answers = ", ".join(f"{name!r}: {entry[0]}" for table in tables for name, entry in table.items())
    directory = tmp_path_factory.mktemp("messages")
    write(directory, "raw.py", _APP.replace("ANSWERS_OF_THE_TEST", f"{{{answers}}}"))
    with contextlib.closing(Forgiving("raw:app", directory=directory)) as server:
        server.wait_ready()
        yield server


@pytest.mark.parametrize("name", _REFUSED)
def test_invalid_messages_are_failures_of_the_app(app: Forgiving, name: str) -> None:
    answer = app.http.get(f"/{name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "app_failed")
    assert "x-injected" not in answer.headers
    app.wait_line(f"GET /{name} raised InvalidMessage: .*{_REFUSED[name][1]}")


@pytest.mark.parametrize("name", _CUT_OFF)
def test_an_answer_that_has_begun_is_cut_off(app: Forgiving, name: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        app.http.get(f"/{name}")
    app.wait_line(f"GET /{name} raised InvalidMessage: .*{_CUT_OFF[name][1]}")


@pytest.mark.parametrize("name", _ALLOWED)
def test_unusual_valid_messages_are_sent(app: Forgiving, name: str) -> None:
    answer = app.http.get(f"/{name}")
    assert (answer.status_code, answer.text) == _ALLOWED[name][1]


@pytest.mark.parametrize("name", _SOCKETS)
def test_a_socket_is_closed_with_1011(app: Forgiving, name: str) -> None:
    with connect(f"{app.url.replace('http', 'ws')}/{name}") as ws:
        with pytest.raises(ConnectionClosedError):
            ws.recv(timeout=LONG_S)
        assert ws.close_code == 1011
    app.wait_line(f"WebSocket /{name} raised InvalidMessage: .*{_SOCKETS[name][1]}")


@pytest.mark.parametrize("name", _HANDSHAKES)
def test_a_handshake_is_refused(app: Forgiving, name: str) -> None:
    with pytest.raises(InvalidStatus) as refused, connect(f"{app.url.replace('http', 'ws')}/{name}"):
        pass
    assert refused.value.response.status_code == 500
    app.wait_line(f"WebSocket /{name} raised InvalidMessage: .*{_HANDSHAKES[name][1]}")


def test_the_front_does_not_fail(app: Forgiving) -> None:
    app.http.get("/status-599")
    assert "failed after its headers" not in app.log
    assert "The server failed" not in app.log
