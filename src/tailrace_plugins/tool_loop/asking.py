"""How a client asks for a response, beside the body of its request: over HTTP, or on a WebSocket."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from tailrace.server import Sender, linger_of

__all__ = ["Asking"]


@dataclass(frozen=True, slots=True)
class Asking:
    """`claim` is the Idempotency-Key, or "". `headers` go to the turns of the model. `begun_here` has the ids of the
    responses that the WebSocket has begun; None over HTTP."""

    sender: Sender
    claim: str
    headers: Mapping[str, str]
    linger_s: float
    begun_here: Collection[str] | None = None

    @classmethod
    def of(
        cls, request: HTTPConnection, claim: str | None, usual_s: float, begun_here: Collection[str] | None = None
    ) -> Asking:
        """`usual_s` is how long a response goes on whose client will come back. Raises: RequestError."""
        linger_s = linger_of(request)
        if request.scope.get("server", ()) is None:  # this server asks itself, as for a batch, and gives up for good
            linger_s = 0.0
        elif linger_s is None:
            linger_s = 0.0 if claim is None and begun_here is None else usual_s
        headers = {name: one for name, one in request.headers.items() if name == "x-tailrace-priority"}
        return cls(Sender.of(request.scope), claim or "", headers, linger_s, begun_here)
