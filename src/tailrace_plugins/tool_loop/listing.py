"""`GET /v1/mcp/servers`: the MCP servers whose tools a key may use."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tailrace.dialects import JsonBody, to_json
from tailrace.server import principal_of

__all__ = ["LISTING_TAG", "listing_paths", "listing_route"]

_PATH = "/v1/mcp/servers"
_OBJECT: JsonBody = {"type": "object"}
LISTING_TAG: JsonBody = {"name": "mcp", "description": "MCP servers, whose tools models may call"}


def listing_route(labels: Callable[[str, str], list[str]]) -> Route:
    """Return the route. `labels` has the servers of an owner and a key."""

    async def show(request: Request) -> Response:
        principal = principal_of(request.scope)
        principal.require("generate")
        data = [{"object": "mcp_server", "label": label} for label in labels(principal.owner, principal.key_id)]
        return Response(to_json({"object": "list", "data": data}), media_type="application/json")

    return Route(_PATH, show, methods=["GET"])


def listing_paths() -> JsonBody:
    """Return the operation by path and method, for the OpenAPI document."""
    content: JsonBody = {"application/json": {"schema": _OBJECT}}
    return {
        _PATH: {
            "get": {
                "operationId": "list_mcp_servers",
                "summary": "Lists the MCP servers whose tools the key may use.",
                "tags": [LISTING_TAG["name"]],
                "responses": {
                    "200": {"description": "Done.", "content": content},
                    "4XX": {"description": "Refused, with the reason.", "content": content},
                },
            }
        }
    }
