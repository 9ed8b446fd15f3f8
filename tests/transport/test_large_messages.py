"""Messages on the WebSocket of Responses are as large as bodies over HTTP, and share their memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.api.process import Server
from tests.http.frames import CLOSE, CONTINUATION, PING, PONG, TEXT, FrameWire, frame
from tests.http.wire import as_json
from tests.waiting import until

_BODY_BYTES = 100_000
_RESPONSES = "/v1/responses"
_BUSY = b"Too many request bodies are being read. Try later."


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that has memory for one body, and usually takes small messages."""
    flags = ("--ws-message-bytes", "1000", "--body-bytes", str(_BODY_BYTES), "--pending-body-bytes", str(_BODY_BYTES))
    with closing(Server("scripted", *flags)) as server:
        yield server.wait_ready()


def _create(num_bytes: int) -> bytes:
    body = {"type": "response.create", "model": "scripted", "input": "Hi.", "max_output_tokens": 1, "metadata": {}}
    return json.dumps(body | {"user": "x" * num_bytes}).encode()


def _last_kind(wire: FrameWire) -> str:
    while True:
        event = as_json(wire.frame()[1])
        if event["type"].rpartition(".")[2] in ("completed", "incomplete", "failed", "error"):
            return str(event["type"])


def test_a_command_is_as_large_as_a_body(server: Server) -> None:
    with FrameWire(server.port) as wire:
        wire.open(_RESPONSES)
        for _ in range(3):  # its memory is free again
            wire.send_bytes(frame(TEXT, _create(60_000)))
            assert _last_kind(wire) in ("response.completed", "response.incomplete")
        half = _create(60_000)
        wire.send_bytes(frame(TEXT, half[:30_000], is_last=False) + frame(CONTINUATION, half[30_000:]))
        assert _last_kind(wire) in ("response.completed", "response.incomplete")


def test_a_command_is_no_larger_than_a_body(server: Server) -> None:
    for path, num_bytes in ((_RESPONSES, _BODY_BYTES + 1), ("/v1/ws", 1001)):
        with FrameWire(server.port) as wire:
            wire.open(path)
            wire.send_bytes(frame(TEXT, b"x" * num_bytes))
            assert wire.closing()[0] == 1009


def test_messages_that_arrive_share_the_memory_of_bodies(server: Server) -> None:
    """A connection that leaves gives its part back, also in the middle of a message."""
    content = _create(60_000)
    with FrameWire(server.port) as first:
        first.open(_RESPONSES)
        _begin(first, content[:-1])
        assert not _is_answered(server, content)
        first.send_bytes(frame(CONTINUATION, content[-1:]))
        assert _last_kind(first) in ("response.completed", "response.incomplete")
        assert _is_answered(server, content)
        _begin(first, content[:-1])
        assert not _is_answered(server, content)
    until(lambda: _is_answered(server, content))


def _begin(wire: FrameWire, content: bytes) -> None:
    """Send the beginning of a message, and return when the server has read it."""
    wire.send_bytes(frame(TEXT, content, is_last=False) + frame(PING))
    while wire.frame()[0] != PONG:
        pass


def _is_answered(server: Server, content: bytes) -> bool:
    with FrameWire(server.port) as wire:
        wire.open(_RESPONSES)
        wire.send_bytes(frame(TEXT, content))
        opcode, payload = wire.frame()
        if opcode == CLOSE:
            assert (int.from_bytes(payload[:2], "big"), payload[2:]) == (1013, _BUSY)
        return opcode != CLOSE
