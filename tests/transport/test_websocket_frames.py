"""Handshakes, frames and idle connections on a real socket, including frames that no library sends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import psutil
import pytest
from tests.api.process import Server
from tests.clients.json_socket import open_socket, receive_json, send_json, wait_close
from tests.http.frames import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    FrameWire,
    frame,
    handshake,
)
from tests.http.wire import as_json
from tests.waiting import LONG_S
from websockets.exceptions import InvalidStatus


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """A server with low limits."""
    with closing(Server("scripted", "--ws-message-bytes", "1000", "--ws-sockets", "3")) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def impatient() -> Iterator[Server]:
    """A server that soon closes idle sockets."""
    with closing(Server("scripted:tokens_per_s=200", "--ws-ping-s", "0.4", "--ws-idle-s", "3")) as server:
        yield server.wait_ready()


# Frames


@pytest.mark.parametrize("path", ["/", "/v1/ws"])
def test_bad_frames_close_the_socket_with_their_code(small: Server, path: str) -> None:
    cases: list[tuple[bytes, int]] = [
        (frame(BINARY, b"Hi"), 1003),
        (frame(TEXT, b"\xff"), 1007),
        (frame(TEXT, "é".encode()[:1], is_last=False) + frame(CONTINUATION, b"e"), 1007),
        (frame(TEXT, b"x" * 1001), 1009),
        (frame(TEXT, b"x" * 600, is_last=False) + frame(CONTINUATION, b"x" * 600), 1009),
        (frame(TEXT, b"Hi", is_masked=False), 1002),
        (frame(TEXT | 0x40, b"Hi"), 1002),
        (frame(0x3, b"Hi"), 1002),
        (frame(CONTINUATION, b"Hi"), 1002),
        (frame(PING, b"x" * 126), 1002),
    ]
    for content, code in cases:
        with FrameWire(small.port) as wire:
            wire.open(path)
            wire.send_bytes(content)
            assert wire.closing()[0] == code
            wire.send_bytes(frame(CLOSE))
            with pytest.raises(EOFError):
                wire.frame()


def test_a_message_may_come_in_pieces(server: Server) -> None:
    pieces = json.dumps({"type": "ping", "id": "🌊 é"}, ensure_ascii=False).encode()
    with open_socket(server) as socket:
        socket.send((pieces[i : i + 1] for i in range(len(pieces))), text=True)
        assert receive_json(socket) == {"type": "pong", "id": "🌊 é"}
        socket.ping().wait(LONG_S)


@pytest.mark.deep
def test_endless_fragments_use_no_memory(server: Server) -> None:
    memory = psutil.Process(server.process.pid).memory_info
    with FrameWire(server.port) as wire:
        wire.open("/v1/ws")
        wire.send_bytes(frame(TEXT, b'{"type":"ping",', is_last=False))
        before_bytes = memory().rss
        for _ in range(20):
            wire.send_bytes(frame(CONTINUATION, is_last=False) * 10_000)
        wire.send_bytes(frame(CONTINUATION, b'"id":"a"}'))
        assert wire.frame() == (TEXT, b'{"type":"pong","id":"a"}')
        assert memory().rss - before_bytes < 5 * 2**20


@pytest.mark.deep
def test_pings_of_a_client_that_does_not_read_use_no_memory(server: Server) -> None:
    memory = psutil.Process(server.process.pid).memory_info
    with FrameWire(server.port, receive_bytes=4096) as wire:
        wire.open("/v1/ws")
        before_bytes = memory().rss
        for number in range(200):
            wire.send_bytes(frame(PING, bytes([number]) * 125) * 400)
        wire.send_bytes(frame(TEXT, b'{"type":"ping"}'))
        seen = []
        while (found := wire.frame())[0] != TEXT:
            seen.append(found)
        assert all(opcode == PONG for opcode, _ in seen)
        assert len(seen) < 80_000  # 10 MB, of which some were left out
        assert memory().rss - before_bytes < 10 * 2**20


def test_no_extension_is_negotiated(server: Server) -> None:
    with open_socket(server, compression="deflate") as socket:
        assert socket.response is not None
        assert "sec-websocket-extensions" not in socket.response.headers
        assert socket.response.headers["x-request-id"]


# Time


def test_a_client_that_answers_no_pings_is_cut_off(impatient: Server) -> None:
    with open_socket(impatient) as socket, FrameWire(impatient.port) as deaf:
        deaf.open("/v1/ws")
        send_json(socket, type="create", id="a", prompt="On and on.", max_tokens=50_000)
        assert receive_json(socket)["type"] == "created"
        for _ in range(500):  # for several pings
            assert receive_json(socket)["type"] == "delta"
        assert deaf.closing() == (1011, "Pings were not answered.")


def test_an_idle_socket_is_closed(impatient: Server) -> None:
    with open_socket(impatient, "/") as chat, open_socket(impatient) as socket:
        for one in (chat, socket):
            assert wait_close(one) == (1001, "The connection was idle for too long.")


# The handshake


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1/ws", {"connection": "keep-alive", "upgrade": ""}, 426),
        ("GET", "/v1/ws", {"sec-websocket-version": "8"}, 426),
        ("GET", "/v1/ws", {"sec-websocket-version": ""}, 400),
        ("GET", "/v1/ws", {"sec-websocket-key": ""}, 400),
        ("GET", "/v1/ws", {"sec-websocket-key": "kanarie7f3a"}, 400),
        ("POST", "/v1/ws", {}, 405),
        ("GET", "/v1/ws?\xff", {}, 101),
        ("GET", "/\xff\xfe/%ff", {}, 404),
        ("GET", "/nowhere", {}, 404),
        ("GET", "/v1/ws", {"origin": "http://evil.test"}, 403),
        ("GET", "/v1/ws", {"origin": "null"}, 403),
        ("GET", "/", {"origin": "http://localhost.evil.test"}, 403),
        ("GET", "/v1/ws", {"host": "evil.test"}, 403),
        ("GET", "/v1/ws", {"x-large": "x" * 20_000}, 431),
    ],
)
def test_answers_to_handshakes(server: Server, method: str, path: str, headers: dict[str, str], status: int) -> None:
    with server.wire() as wire:
        wire.send(method, path, None, handshake() | headers)
        found = wire.head()
        if status == 101:
            assert found in (101, 400)  # a parser may be strict about bytes beyond ASCII
            return
        body = wire.body()
        assert found in (status, 400) if "\xff" in path else found == status
        assert b"kanarie7f3a" not in body
        if found != 431 and "\xff" not in path:
            assert as_json(body)["error"]["message"]
        if status == 426:
            assert wire.headers["upgrade"] == "websocket"
    assert server.http.get("/health").status_code == 200


def test_sockets_are_counted(small: Server) -> None:
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(open_socket(small))
        with pytest.raises(InvalidStatus) as refused:
            open_socket(small)
        assert refused.value.response.status_code == 429
        assert refused.value.response.headers["retry-after"] == "5"
    with open_socket(small) as socket:
        send_json(socket, type="ping")
        assert receive_json(socket) == {"type": "pong"}


def test_an_upgrade_during_an_answer_cuts_both(paced: Server) -> None:
    body = {"prompt": "Long.", "max_tokens": 5000, "stream": True}
    with paced.wire() as wire:
        wire.send("POST", "/v1/completions", body)
        assert wire.head() == 200
        stream_id = wire.headers["x-stream-id"]
        wire.chunk()
        wire.send("GET", "/v1/ws", None, handshake())
        _, is_complete = wire.rest()
        assert not is_complete
    assert paced.wait_state(stream_id, "cancelled")


def test_a_hundred_sockets_come_and_go(server: Server) -> None:
    def one(number: int) -> None:
        with open_socket(server) as socket:
            send_json(socket, type="ping", id=str(number))
            assert receive_json(socket) == {"type": "pong", "id": str(number)}

    threads = [threading.Thread(target=one, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert not any(thread.is_alive() for thread in threads)
