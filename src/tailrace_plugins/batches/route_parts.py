"""What the routes of both APIs share."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tailrace.server import owner_of, principal_of

__all__ = ["json_answer", "owner_with"]


def owner_with(action: str, request: Request) -> str:
    """Return the owner of a request whose key has the scope `action`. Raises: Forbidden."""
    principal_of(request.scope).require(action)
    return owner_of(request.scope)


def json_answer(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
