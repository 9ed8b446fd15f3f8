"""The principal of a request, which the edge has authenticated, and its caller, who is responsible for its effects."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace
from starlette.types import Scope

from tailrace.errors import Forbidden
from tailrace.transport.addresses import network_of
from tailrace.types import ANONYMOUS, Arrival, GenerateRequest, VectorRequest

__all__ = [
    "AUTHENTICATE", "PRINCIPAL", "Principal", "arrival_of", "caller_of", "owner_of", "principal_of", "sent_by",
    "trace_of",
]  # fmt: skip

RequestT = TypeVar("RequestT", GenerateRequest, VectorRequest)

_TRACEPARENT = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
PRINCIPAL = "tailrace_principal"  # the key of the principal in an ASGI scope
AUTHENTICATE = "tailrace_authenticate"  # of a function without arguments: the principal of a WebSocket now


@dataclass(frozen=True, slots=True)
class Principal:
    """The owner whose streams a request may start, follow, stop and delete, and the request's further rights.

    `scopes` are those of the key; None allows everything, because no keys are in use. The principal of a ticket has
    `stream_id`, the only stream that it may follow.

    Raises: ValueError for an empty name, or one with a NUL character.
    """

    owner: str = ANONYMOUS
    key_id: str = ""
    scopes: tuple[str, ...] | None = None
    stream_id: str | None = None

    def __post_init__(self) -> None:
        if not self.owner or "\0" in self.owner:
            raise ValueError("an owner's name must not be empty or have a NUL character")

    def has(self, action: str) -> bool:
        """Return whether the key has this scope, one of `keys.ACTIONS`."""
        return self.scopes is None or action in self.scopes

    def require(self, action: str) -> None:
        """Raises: Forbidden if the key does not have this scope, one of `keys.ACTIONS`."""
        if not self.has(action):
            raise Forbidden(f"This key does not have the scope {action}.", param="authorization")

    def require_within(self, kind: str, name: str) -> None:
        """Raises: Forbidden if the key is limited to other wires or models; `kind` is wire or model."""
        if self.scopes is None or f"{kind}:{name}" in self.scopes:
            return
        if any(scope.startswith(f"{kind}:") for scope in self.scopes):
            raise Forbidden(f"This key may not use this {kind}.", param="authorization")

    def require_generation(self, *, wire: str, model: str) -> None:
        """Raises: Forbidden if the key may not generate, or not on this wire or with this model."""
        self.require("generate")
        self.require_within("wire", wire)
        self.require_within("model", model)

    def require_stream(self, stream_id: str) -> None:
        """Raises: Forbidden if the request has a ticket for another stream."""
        if self.stream_id is not None and self.stream_id != stream_id:
            raise Forbidden("This ticket is for another stream.", param="ticket")


_ANYBODY = Principal()


def principal_of(scope: Scope) -> Principal:
    """Return the principal that the edge has put into the scope, or the anonymous one. Clients cannot write to a
    scope."""
    principal = scope.get(PRINCIPAL, _ANYBODY)
    assert isinstance(principal, Principal)
    return principal


def owner_of(scope: Scope) -> str:
    return principal_of(scope).owner


def caller_of(scope: Scope) -> str:
    """Return who is responsible for a request: its key. Without keys it is the client's network, or "" if the
    connection has no address. Headers such as X-Forwarded-For do not count, because clients can forge them. So without
    keys all clients of one proxy are one caller."""
    if key_id := principal_of(scope).key_id:
        return f"key {key_id}"
    client = scope.get("client")
    return network_of(client[0]) if client else ""


def trace_of(scope: Scope) -> str:
    """Return the header `traceparent` of a request; "" if it has none, or an invalid one.

    *Source:* Trace Context, W3C Recommendation of 2021-11-23, section 3.2.
    """
    found = [value for name, value in scope.get("headers", ()) if name == b"traceparent"]
    match = _TRACEPARENT.fullmatch(found[0]) if len(found) == 1 else None
    is_valid = match is not None and match[1].strip(b"0") and match[2].strip(b"0")
    return found[0].decode() if is_valid else ""


def arrival_of(scope: Scope, *, wire: str, model: str) -> Arrival:
    """Return the identity of a request that is not parsed yet."""
    principal = principal_of(scope)
    return Arrival(model, wire, principal.owner, principal.key_id, trace_of(scope))


def sent_by(scope: Scope, request: RequestT, *, wire: str, model: str) -> RequestT:
    """Return the request with its model, caller, owner, key and wire."""
    principal = principal_of(scope)
    return replace(
        request,
        model=model,
        caller=caller_of(scope),
        owner=principal.owner,
        key_id=principal.key_id,
        wire=wire,
        trace=trace_of(scope),
    )
