"""The address to listen on, and the addresses of clients. Imports little, so that commands bind their socket before
they import a server."""

from __future__ import annotations

import ipaddress
import socket

from tailrace.settings import Settings

__all__ = ["bind", "is_loopback", "listens_on_loopback", "network_of"]


def bind(settings: Settings) -> socket.socket:
    """Bind the socket before anything slow starts. It does not listen yet.

    Raises: OSError if the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.host, settings.port))
    except OSError:
        sock.close()
        raise
    return sock


def listens_on_loopback(host: str) -> bool:
    """Return whether a server on this address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def network_of(address: str) -> str:
    """Return an IPv4 address itself, or the /64 network of an IPv6 address, which usually belongs to one customer."""
    if ":" not in address:
        return address
    ip = ipaddress.IPv6Address(address.partition("%")[0])
    return str(ip.ipv4_mapped or ipaddress.IPv6Network((int(ip) >> 64 << 64, 64)))


_LOOPBACK_NETWORK = network_of("::1")


def is_loopback(caller: str) -> bool:
    """Return whether a caller, in the form of `network_of`, is on this machine, where it may be a proxy for many
    clients."""
    return caller.startswith("127.") or caller == _LOOPBACK_NETWORK
