"""What `tailrace run` does with requests before its app answers them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.apps.process import AppServer, Forgiving, write
from tests.http.frames import BINARY, frame, handshake
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect

_APP = """
import asyncio
from tailrace import serve


@serve.deployment(max_ongoing_requests=1)
class Waiting:
    async def __call__(self, request):
        await asyncio.sleep(500)


async def web(scope, receive, send):
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        raise ValueError("x" * 300)


app = Waiting.bind()
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("waiting")
    write(directory, "waiting.py", _APP)
    return directory


@pytest.fixture
def bare(directory: Path) -> Iterator[AppServer]:
    with contextlib.closing(Forgiving("waiting:web", directory=directory)) as server:
        yield server.wait_ready()


def test_a_websocket_that_waits_for_the_app_is_not_read(directory: Path) -> None:
    """Else the server would keep all that it sends in memory."""
    with contextlib.closing(AppServer("waiting:app", directory=directory)) as server:
        server.wait_ready()
        with (
            socket.create_connection(("127.0.0.1", server.port)) as first,
            socket.create_connection(("127.0.0.1", server.port)) as second,
        ):
            first.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            lines = [f"{name}: {text}" for name, text in {"host": "localhost", **handshake()}.items()]
            second.sendall("\r\n".join(["GET / HTTP/1.1", *lines, "", ""]).encode())
            second.settimeout(3.0)
            sent, message = 0, frame(BINARY, bytes(500_000))
            with contextlib.suppress(TimeoutError):
                while sent < 100_000_000:
                    second.sendall(message)
                    sent += len(message)
            assert sent < 50_000_000  # more than the kernel buffers


def test_a_long_error_is_cut_to_a_close_frame(bare: AppServer) -> None:
    url = f"{bare.url.replace('http', 'ws')}/"
    with connect(url, proxy=None) as client, pytest.raises(ConnectionClosedError) as closed:
        client.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1011
    assert "control frame too long" not in bare.log
