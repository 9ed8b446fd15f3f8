"""The limits of connections, and idle ones."""

from __future__ import annotations

import asyncio
import socket

import pytest
from tests.api.process import Server

from tailrace.settings import Settings
from tailrace.transport.connections import Connections


@pytest.mark.parametrize(
    ("address", "num_allowed"),
    [
        ("192.0.2.1", 10),
        ("2001:db8::1", 10),
        ("127.0.0.1", 75),
        ("127.3.4.5", 75),
        ("::1", 75),
        ("::ffff:127.0.0.1", 75),
    ],
)
async def test_connections_from_one_address(address: str, num_allowed: int) -> None:
    connections = Connections(Settings(max_connections=100))
    ours, theirs = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    with theirs:
        taken = [connections.enter(transport, address) for _ in range(num_allowed)]
        assert not any(place.is_refused for place in taken)
        assert connections.enter(transport, address).is_refused
        assert not connections.enter(transport, "198.51.100.1").is_refused
        transport.close()


async def test_an_ipv6_network_is_one_client() -> None:
    connections = Connections(Settings(max_connections=10))  # of which one client has one
    ours, theirs = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    with theirs:
        assert not connections.enter(transport, "2001:db8::1").is_refused
        assert connections.enter(transport, "2001:db8::2").is_refused
        assert not connections.enter(transport, "2001:db8:0:1::1").is_refused
        transport.close()


_LONG = "/query-stream?query=Hi&max_tokens=60000"


def _get(connection: socket.socket, path: str) -> bytes:
    """Return the answer so far: its head, and all of `/livez`."""
    connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    answer = b""
    while b"\r\n\r\n" not in answer or (path == "/livez" and not answer.endswith(b"}")):
        received = connection.recv(2**16)
        assert received, "the server has closed the connection"
        answer += received
    return answer


def test_a_new_connection_takes_the_place_of_the_one_that_is_idle_for_the_longest_time() -> None:
    running = Server("scripted", "--max-connections", "6", "--client-connections", "100").wait_ready()
    kept: list[socket.socket] = []
    try:
        busy = socket.create_connection(("127.0.0.1", running.port))
        assert b"200 OK" in _get(busy, _LONG)
        for _ in range(5):
            kept.append(socket.create_connection(("127.0.0.1", running.port)))
            assert b"200 OK" in _get(kept[-1], "/livez")
        assert b"200 OK" in _get(kept[0], "/livez")  # the second one waits for the longest time now
        for number in (1, 2):
            kept.append(socket.create_connection(("127.0.0.1", running.port)))
            assert b"200 OK" in _get(kept[-1], "/livez")
            assert kept[number].recv(1) == b""
        assert b"200 OK" in _get(kept[0], "/livez")
        assert busy.recv(1)
    finally:
        for connection in (busy, *kept):
            connection.close()
        running.close()


@pytest.mark.deep
def test_busy_connections_are_not_closed_for_new_ones() -> None:
    running = Server("scripted", "--max-connections", "4", "--client-connections", "100").wait_ready()
    open_ones = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(4)]
    try:
        for connection in open_ones:
            assert b"200 OK" in _get(connection, _LONG)
        late = socket.create_connection(("127.0.0.1", running.port))
        assert b"503" in late.recv(2**16)
        assert all(connection.recv(1) for connection in open_ones)
        late.close()
    finally:
        for connection in open_ones:
            connection.close()
        running.close()


def test_a_client_beyond_its_own_limit_closes_no_connections_of_others() -> None:
    running = Server("scripted", "--max-connections", "3", "--client-connections", "2").wait_ready()
    address = ("127.0.0.1", running.port)
    others = socket.create_connection(address, source_address=("127.0.0.2", 0))
    open_ones = [others]
    try:
        assert b"200 OK" in _get(others, "/livez")
        for _ in range(2):
            open_ones.append(socket.create_connection(address))
            assert b"200 OK" in _get(open_ones[-1], "/livez")
        open_ones.append(socket.create_connection(address))
        assert b"503" in open_ones[-1].recv(2**16)
        assert b"200 OK" in _get(others, "/livez")
    finally:
        for connection in open_ones:
            connection.close()
        running.close()


def test_idle_connections_outlive_those_of_proxies() -> None:
    """A proxy that sends a request while the server closes the connection answers 502. nginx, ingress-nginx and AWS's
    load balancers keep idle connections for 60 s."""
    assert Settings().keep_alive_s > 75
