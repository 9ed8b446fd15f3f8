"""The errors of MCP tools. Clients see the codes."""

from __future__ import annotations

from tailrace.errors import RequestError

__all__ = [
    "ApprovalConflict",
    "LoopsFull",
    "NotBegun",
    "ServerUnreachable",
    "ToolServerMissing",
    "UnknownApproval",
    "UnknownLoop",
]


class ServerUnreachable(RequestError):
    """An MCP server does not list its tools."""

    status = 424
    code = "mcp_server_failed"


class UnknownApproval(RequestError):
    """There is no such approval request of this owner."""

    status = 404
    code = "unknown_approval_request"


class ApprovalConflict(RequestError):
    """The approval cannot be used: the tool has changed, or a response that runs uses it."""

    status = 409
    code = "approval_conflict"


class UnknownLoop(RequestError):
    """There is no such response of this owner."""

    status = 404
    code = "unknown_stream"


class ToolServerMissing(RequestError):
    """This server cannot go on with the response, and another server of the same Redis may."""

    status = 503
    code = "mcp_server_missing"

    @classmethod
    def of(cls, lacks: str) -> ToolServerMissing:
        text = f"This server cannot go on with the response: it does not have {lacks}. Ask another server that shares"
        return cls(f"{text} its Redis. The response is kept.", retry_after_s=1.0)


class NotBegun(RequestError):
    """The server that began the response was refused its first turn, or the response was deleted during this turn."""

    status = 503
    code = "mcp_not_begun"


class LoopsFull(RequestError):
    """Too many responses with MCP tools run."""

    status = 429
    code = "too_many_tool_loops"
