"""A server without MCP tools, which may share a Redis with servers that have some: it says that it cannot go on."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp

from tailrace.dialects import JsonBody
from tailrace.server import LaneStream, LaneTake, Take, owner_of
from tailrace_plugins.tool_loop.asked import loop_id_of
from tailrace_plugins.tool_loop.journal import Journal
from tailrace_plugins.tool_loop.mcp_errors import ToolServerMissing

__all__ = ["Elsewhere"]

_RESPONSES = "/v1/responses"
_RESPONSE = "/v1/responses/{response_id}"


class Elsewhere(LaneTake):
    """Refuses requests about responses with MCP tools that are kept, and leaves all others to the wire."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    @property
    def lanes(self) -> Mapping[str, LaneTake]:
        return {_RESPONSES: self}

    @property
    def table(self) -> Mapping[tuple[str, str], Take]:
        return {
            ("POST", _RESPONSES): self._begin,
            ("GET", _RESPONSE): self._refuse,
            ("POST", _RESPONSE + "/cancel"): self._refuse,
            ("DELETE", _RESPONSE): self._refuse,
        }

    async def _begin(self, request: Request, body: JsonBody) -> ASGIApp | None:
        await self._check(request, body.get("previous_response_id"))
        return None

    async def _refuse(self, request: Request, body: JsonBody) -> ASGIApp | None:
        await self._check(request, request.path_params["response_id"])
        return None

    async def create(
        self, sender: HTTPConnection, body: JsonBody, key: str | None, begun: Collection[str]
    ) -> LaneStream | None:
        await self._check(sender, body.get("previous_response_id"))
        return None

    async def follow(self, sender: HTTPConnection, stream_id: str, number: int) -> LaneStream | None:
        await self._check(sender, f"resp_{stream_id}")
        return None

    async def leave(self, sender: HTTPConnection, stream_ids: Collection[str]) -> None:
        pass  # it has none

    async def _check(self, request: HTTPConnection, response_id: object) -> None:
        """Raises: ToolServerMissing if there is such a response of this owner, StorageError."""
        loop_id = loop_id_of(response_id)
        if loop_id is not None and loop_id in await self._journal.of(owner_of(request.scope)):
            raise ToolServerMissing.of("any MCP tools (--mcp-servers, --mcp-hosts)")

    async def forget(self, owner: str) -> dict[str, int]:
        """Delete all responses of an owner. Raises: StorageError."""
        return {"tool_loops": await self._journal.forget(owner)}
