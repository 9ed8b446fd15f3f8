"""Who is at the other end of a connection, as far as the socket tells."""

from __future__ import annotations

import ipaddress

from starlette.types import Scope

__all__ = ["caller_of", "is_loopback", "network_of"]


def network_of(address: str) -> str:
    """Who has an address: an IPv4 address itself, or the /64 network of an IPv6 address, since a household has all of
    that."""
    if ":" not in address:
        return address
    ip = ipaddress.IPv6Address(address.partition("%")[0])
    return str(ip.ipv4_mapped or ipaddress.IPv6Network((int(ip) >> 64 << 64, 64)))


def is_loopback(caller: str) -> bool:
    """Whether a caller, as `network_of` names it, is on this machine, where it may be a proxy for many."""
    return caller.startswith("127.") or caller == network_of("::1")


def caller_of(scope: Scope) -> str:
    """Who sent a request: the network of the connection's other end, or "" where that has no address. Headers do not
    count, since a client writes them as it likes. So all clients of one proxy are one caller."""
    client = scope.get("client")
    return network_of(client[0]) if client else ""
