"""The requests of Responses that are about MCP tools."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping

from starlette.requests import Request
from starlette.types import ASGIApp

from tailrace.dialects import JsonBody
from tailrace.errors import SeqOutOfRange
from tailrace.server import Options, Server, Settings, Table, Take, owner_of, read_query
from tailrace_plugins.tool_loop.asked import loop_id_of, names_mcp
from tailrace_plugins.tool_loop.call_maker import CallLimits
from tailrace_plugins.tool_loop.journal import Journal
from tailrace_plugins.tool_loop.lanes import LoopLanes
from tailrace_plugins.tool_loop.loop import Loop
from tailrace_plugins.tool_loop.loops import Loops
from tailrace_plugins.tool_loop.response_answers import EventsAnswer, begun_answer, deleted, response_of
from tailrace_plugins.tool_loop.servers_file import McpServer
from tailrace_plugins.tool_loop.tool_servers import ToolServers

__all__ = ["Takes", "open_loops"]

_RESPONSES = "/v1/responses"
_RESPONSE = "/v1/responses/{response_id}"


class Takes:
    """Answers these requests, and leaves all others to the wire."""

    def __init__(self, loops: Loops, server: Server) -> None:
        self._loops = loops
        self._server = server
        self.forget = loops.forget
        self.labels = loops.labels
        self.drain = loops.drain
        self.lanes = {_RESPONSES: LoopLanes(loops)}

    @property
    def table(self) -> Mapping[tuple[str, str], Take]:
        return {
            ("POST", _RESPONSES): self._begin,
            ("GET", _RESPONSE): self._show,
            ("POST", _RESPONSE + "/cancel"): self._cancel,
            ("DELETE", _RESPONSE): self._delete,
        }

    async def _begin(self, request: Request, body: JsonBody) -> ASGIApp | None:
        if not names_mcp(body):
            return None
        asking = self._loops.asking(request, request.headers.get("idempotency-key"))
        loop = await self._loops.begin(asking, body)
        if body.get("background"):
            return EventsAnswer(loop, 0, self._server.settings.heartbeat_s) if body.get("stream") else response_of(loop)
        is_stream = bool(body.get("stream"))
        return await begun_answer(loop, request, is_stream=is_stream, heartbeat_s=self._server.settings.heartbeat_s)

    async def _found(self, request: Request) -> Loop | None:
        loop_id = loop_id_of(request.path_params["response_id"])
        return await self._loops.shown(owner_of(request.scope), loop_id) if loop_id is not None else None

    async def _show(self, request: Request, body: JsonBody) -> ASGIApp | None:
        loop = await self._found(request)
        if loop is None:
            return None
        query = read_query(request.scope["query_string"])
        if query.get("stream") != "true":
            return response_of(loop)
        after = query.get("starting_after", "")
        if after and not re.fullmatch("[0-9]{1,15}", after, re.ASCII):
            raise SeqOutOfRange("starting_after must be a sequence number.", param="starting_after")
        return EventsAnswer(loop, int(after) + 1 if after else 0, self._server.settings.heartbeat_s)

    async def _cancel(self, request: Request, body: JsonBody) -> ASGIApp | None:
        loop = await self._found(request)
        if loop is None:
            return None
        return response_of(await self._loops.cancel(loop))

    async def _delete(self, request: Request, body: JsonBody) -> ASGIApp | None:
        loop = await self._found(request)
        if loop is None:
            return None
        await self._loops.delete(loop)
        return deleted(loop)


@contextlib.asynccontextmanager
async def open_loops(
    server: Server,
    table: Table,
    specs: Mapping[str, McpServer],
    hosts: frozenset[str],
    options: Options,
    group: asyncio.TaskGroup,
) -> AsyncIterator[Takes]:
    """Raises: StorageError."""
    limits = CallLimits(options["mcp_call_s"], options["mcp_result_bytes"])
    tool_servers = ToolServers(server, specs, hosts)
    loops = Loops(server, Journal(table), tool_servers, limits, options["mcp_calls"], group)

    def use(settings: Settings) -> None:
        limits.call_s, limits.result_bytes = options["mcp_call_s"], options["mcp_result_bytes"]
        loops.allow_calls(options["mcp_calls"])

    server.on_reload(use)
    await loops.start()
    try:
        yield Takes(loops, server)
    finally:
        await loops.close()
