"""Who asks, the same for every wire: the principal, as the edge found out, and the caller who is held responsible."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace

from starlette.types import Scope

from tailrace.errors import Forbidden
from tailrace.types import ANONYMOUS, Asked, GenerateRequest

__all__ = [
    "PRINCIPAL", "Principal", "asked_by", "caller_of", "is_loopback", "network_of", "owner_of", "principal_of",
    "sent_by",
]  # fmt: skip

PRINCIPAL = "tailrace_principal"  # the key under which a scope has it


@dataclass(frozen=True, slots=True)
class Principal:
    """Whose streams a request may begin, follow, stop and delete, and what else it may do.

    `scopes` are those of its key; None is everything, where no keys are in use. A ticket's principal has `stream_id`,
    the only stream that it may follow.

    Raises: ValueError for an empty name, or one with a NUL character.
    """

    owner: str = ANONYMOUS
    key_id: str = ""
    scopes: tuple[str, ...] | None = None
    stream_id: str | None = None

    def __post_init__(self) -> None:
        if not self.owner or "\0" in self.owner:
            raise ValueError("an owner's name is not empty and has no NUL character")

    def require(self, action: str) -> None:
        """Raises: Forbidden if its key does not have this scope, one of `keys.ACTIONS`."""
        if self.scopes is not None and action not in self.scopes:
            raise Forbidden(f"This key does not have the scope {action}.", param="authorization")

    def require_within(self, kind: str, name: str) -> None:
        """Raises: Forbidden if its key is limited to other wires or models; `kind` is wire or model."""
        if self.scopes is None or f"{kind}:{name}" in self.scopes:
            return
        if any(scope.startswith(f"{kind}:") for scope in self.scopes):
            raise Forbidden(f"This key is not for this {kind}.", param="authorization")

    def require_stream(self, stream_id: str) -> None:
        """Raises: Forbidden if it came with a ticket for another stream."""
        if self.stream_id is not None and self.stream_id != stream_id:
            raise Forbidden("This ticket is for another stream.", param="ticket")


_ANYBODY = Principal()


def principal_of(scope: Scope) -> Principal:
    """Whose request it is: anonymous, where the edge put in nobody. Nothing that a client writes gets into a scope."""
    principal = scope.get(PRINCIPAL, _ANYBODY)
    assert isinstance(principal, Principal)
    return principal


def owner_of(scope: Scope) -> str:
    return principal_of(scope).owner


def network_of(address: str) -> str:
    """Who has an address: an IPv4 address itself, or the /64 network of an IPv6 address, since a household has all of
    that."""
    if ":" not in address:
        return address
    ip = ipaddress.IPv6Address(address.partition("%")[0])
    return str(ip.ipv4_mapped or ipaddress.IPv6Network((int(ip) >> 64 << 64, 64)))


_LOOPBACK_NETWORK = network_of("::1")


def is_loopback(caller: str) -> bool:
    """Whether a caller, as `network_of` names it, is on this machine, where it may be a proxy for many."""
    return caller.startswith("127.") or caller == _LOOPBACK_NETWORK


def caller_of(scope: Scope) -> str:
    """Who is held responsible for a request: the key that it came with. Without keys it is the network of the
    connection's other end, or "" where that has no address. Other headers do not count, since a client writes them as
    it likes. So without keys all clients of one proxy are one caller."""
    if key_id := principal_of(scope).key_id:
        return f"key {key_id}"
    client = scope.get("client")
    return network_of(client[0]) if client else ""


def asked_by(scope: Scope, *, wire: str, model: str) -> Asked:
    """Who asks for a generation, before anything was looked at."""
    principal = principal_of(scope)
    return Asked(model, wire, principal.owner, principal.key_id)


def sent_by(scope: Scope, request: GenerateRequest, *, wire: str, model: str) -> GenerateRequest:
    """The request with who sent it, on which wire.

    Raises: Forbidden if the key is not for generating, for this wire or for this model.
    """
    principal = principal_of(scope)
    principal.require("generate")
    principal.require_within("wire", wire)
    principal.require_within("model", model)
    return replace(
        request,
        caller=caller_of(scope),
        owner=principal.owner,
        key_id=principal.key_id,
        wire=wire,
    )
