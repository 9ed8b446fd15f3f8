"""An MCP server of the official SDK over HTTP. `python sums_server.py PORT`. It wants a token in a header."""

from __future__ import annotations

import sys
from typing import Any

import mcp_types
import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.types import ASGIApp, Receive, Scope, Send

server = MCPServer("sums")


@server.tool(annotations=mcp_types.ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def divide(a: int, b: int) -> float:
    """Divides a number by another one."""
    return a / b


def _guarded(app: ASGIApp) -> ASGIApp:
    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and dict(scope["headers"]).get(b"x-token") != b"the-token":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await app(scope, receive, send)

    return guarded


def main() -> None:
    app: Any = server.streamable_http_app()
    uvicorn.run(_guarded(app), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")


if __name__ == "__main__":
    main()
