"""The address to listen on. Imports little, so that commands bind their socket before they import a server."""

from __future__ import annotations

import ipaddress
import socket

from tailrace.settings import Settings

__all__ = ["bind", "listens_on_loopback"]


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
