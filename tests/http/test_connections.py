"""The limit of connections from one address."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tailrace.http.connections import Connections
from tailrace.settings import Settings


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
