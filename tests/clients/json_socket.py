"""A WebSocket with JSON frames, through the `websockets` library."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from tests.api.process import Server
from tests.waiting import LONG_S
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

__all__ = ["open_socket", "receive_json", "send_json", "wait_close"]


def open_socket(server: Server, path: str = "/v1/ws", *, compression: str | None = None) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{server.port}{path}", proxy=None, compression=compression)


def send_json(socket: ClientConnection, **command: object) -> None:
    socket.send(json.dumps(command))


def receive_json(socket: ClientConnection) -> dict[str, Any]:
    found = json.loads(socket.recv(timeout=LONG_S))
    assert isinstance(found, dict)
    return found


def wait_close(socket: ClientConnection) -> tuple[int, str]:
    """Wait until the server closes the socket; returns code and reason."""
    with suppress(ConnectionClosed):
        while True:
            socket.recv(timeout=LONG_S)
    assert socket.close_code is not None
    return socket.close_code, socket.close_reason or ""
