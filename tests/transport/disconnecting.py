"""A client that can disconnect in all possible ways, and sees when the server closes the connection."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import threading
import time

import psutil
from tests.api.process import Server
from tests.http.wire import Wire, as_json

__all__ = ["LIMITS", "SMALL_BYTES", "DisconnectingClient", "refused", "wait_connections"]

LIMITS = ("--header-s", "1", "--keep-alive-s", "1", "--write-s", "1", "--body-s", "1")
SMALL_BYTES = 4096  # of a client's buffer, to be full soon
_GONE_S = 50.0  # the kernel takes thirty seconds to be sure that a silent client has vanished


class DisconnectingClient(Wire):
    """A client that can end its connection in several ways."""

    def __init__(self, server: Server, *, receive_bytes: int = 0) -> None:
        super().__init__(server.port, receive_bytes=receive_bytes)
        self._server = server
        self.port = self.socket.getsockname()[1]

    def __enter__(self) -> DisconnectingClient:
        return self

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close_half(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def vanish(self) -> None:
        """Behave like a machine without a network: a filter drops all packets, so nothing is acknowledged."""
        attach_filter, drop_all = 26, ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
        program = struct.pack("HP", 1, ctypes.addressof(drop_all))
        self.socket.setsockopt(socket.SOL_SOCKET, attach_filter, program)

    def dribble(self, count: int, gone: threading.Event) -> None:
        """Read this many bytes per second."""
        with contextlib.suppress(ConnectionError):
            while not gone.wait(0.05 if count > 20 else 1.0):
                if count:
                    self._received += self.socket.recv(max(count // 20, 1))

    def wait_ended(self) -> None:
        """Wait until the server's process has no socket for this connection."""
        deadline_s = time.monotonic() + _GONE_S
        while self.port in _client_ports(self._server):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)  # the system tells nobody, and asking it takes 4 ms of a processor


def wait_connections(server: Server, count: int) -> None:
    """Wait until at most this many connections are open."""
    deadline_s = time.monotonic() + _GONE_S
    while len(_client_ports(server)) > count:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)  # the system tells nobody, and asking it takes 4 ms of a processor


def _client_ports(server: Server) -> list[int]:
    connections = psutil.Process(server.process.pid).net_connections("tcp4")
    return [connection.raddr.port for connection in connections if connection.raddr]


def refused(client: DisconnectingClient) -> int:
    """Return the status of a refusal in the native format, after which the connection is closed."""
    status = client.head()
    assert client.headers["content-type"] == "application/json"
    assert client.headers["connection"] == "close"
    error = as_json(client.body())["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert client.is_closed()
    client.wait_ended()
    return status
