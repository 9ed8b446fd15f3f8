"""McpConnections to MCP servers, by the official SDK. Each owner has connections of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx2
import mcp_types
import msgspec
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from tailrace.dialects import JsonBody
from tailrace.server import is_deeper
from tailrace_plugins.tool_loop.guarded_http import GuardedTransport, is_public
from tailrace_plugins.tool_loop.loop_rows import Called, DescribedTool
from tailrace_plugins.tool_loop.mcp_errors import ServerUnreachable
from tailrace_plugins.tool_loop.servers_file import McpServer
from tailrace_plugins.tool_loop.stdio import program_transport

__all__ = ["McpConnection", "McpConnections", "protocol_error", "unknown_outcome"]

logger = logging.getLogger("tailrace.mcp")

_CONNECT_S = 30.0
_LIST_S = 30.0
_IDLE_S = 300.0
_MOST = 64  # connections
_MOST_PAGES = 8
_MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_./:-]{0,61}")  # with its label, what a function's name may be
_DESCRIPTION = 4096  # characters
_SCHEMA_BYTES = 32_768
_DEPTH = 32
_NO_ANSWER = (  # the SDK has these errors for answers that do not come, too
    mcp_types.CONNECTION_CLOSED,
    mcp_types.INTERNAL_ERROR,
    mcp_types.INVALID_REQUEST,
    mcp_types.PARSE_ERROR,
    mcp_types.REQUEST_TIMEOUT,
)

if not logger.isEnabledFor(logging.DEBUG):  # a server could fill the log
    for _name in ("client", "httpx2", "mcp"):
        logging.getLogger(_name).setLevel(logging.CRITICAL)


def protocol_error(message: str, code: int = mcp_types.INTERNAL_ERROR) -> JsonBody:
    """Return an error of an `mcp_call`."""
    return {"type": "mcp_protocol_error", "code": code, "message": message}


def unknown_outcome(item_id: str, why: str) -> Called:
    text = f"{why} It is not known whether the tool was called, and it was not called again."
    return Called(item_id=item_id, error=protocol_error(text, mcp_types.CONNECTION_CLOSED), is_unknown=True)


class McpConnection:
    """A session with an MCP server. It lives in a task of its own. `ended` is set when the server has left."""

    def __init__(
        self,
        label: str,
        transport: AbstractAsyncContextManager[Any],  # Any: the SDK's streams
        ended: asyncio.Event | None = None,
    ) -> None:
        self.label = label
        self.num_users = 0
        self.is_lost = False  # for new users: an answer did not come, or was not valid
        self.is_used = False  # whether it has listed its tools before
        self.idle_since_s = 0.0
        self._transport = transport
        self._ended = ended or asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._live())

    @property
    def is_open(self) -> bool:
        return not (self._task.done() or self._closing.is_set() or self._ended.is_set() or self.is_lost)

    async def _live(self) -> None:
        try:
            async with Client(self._transport, cache=None) as client:
                self._client.set_result(client)
                await self._closing.wait()
        except Exception as error:  # servers, their programs and the SDK may raise anything
            logger.debug("The connection to the MCP server %s ended.", self.label, exc_info=error)
        finally:
            if not self._client.done():
                refusal = ServerUnreachable(f"The MCP server {self.label} cannot be reached.", param="tools")
                self._client.set_exception(refusal)
                self._client.exception()  # nobody may have waited

    async def ready(self) -> Client:
        """Return the client, once it is connected. Raises: ServerUnreachable."""
        await asyncio.wait([self._client], timeout=_CONNECT_S)
        if not self._client.done():
            self.close()
            await asyncio.wait([self._client])
        return self._client.result()

    def close(self) -> None:
        """End the session. `closed` waits for it."""
        self._closing.set()
        if not self._client.done():
            self._task.cancel()

    async def closed(self) -> None:
        self.close()
        await asyncio.wait([self._task])

    async def tools(self) -> list[DescribedTool]:
        """Return the tools of the server, as far as models can have them. Raises: ServerUnreachable."""
        client = await self.ready()
        found: dict[str, DescribedTool] = {}
        try:
            async with asyncio.timeout(_LIST_S):
                cursor: str | None = None
                for _ in range(_MOST_PAGES):
                    page = await client.session.list_tools(params=mcp_types.PaginatedRequestParams(cursor=cursor))
                    for tool in page.tools:
                        if len(found) < _MOST_TOOLS and (described := _described(tool)) is not None:
                            found.setdefault(described.name, described)
                    cursor = page.next_cursor
                    if cursor is None:
                        break
        except Exception as error:  # as above
            logger.debug("The MCP server %s lists no tools.", self.label, exc_info=error)
            self.is_lost = True
            raise ServerUnreachable(f"The MCP server {self.label} does not list its tools.", param="tools") from None
        self.is_used = True
        return list(found.values())

    async def call(self, item_id: str, name: str, arguments: JsonBody, *, limit_s: float, most_bytes: int) -> Called:
        """Call a tool once. The connection must be ready.

        The SDK's own method also checks the result against the tool's schema, whose regular expressions may take any
        time, and repeats calls.
        """
        client = self._client.result()
        params = mcp_types.CallToolRequestParams(name=name, arguments=arguments)
        try:
            async with asyncio.timeout(limit_s):
                result = await client.session.send_request(
                    mcp_types.CallToolRequest(params=params), mcp_types.CallToolResult
                )
        except TimeoutError:
            return unknown_outcome(item_id, f"The tool did not answer within {limit_s:g} s.")
        except MCPError as error:
            if error.code not in _NO_ANSWER:
                return Called(item_id=item_id, error=protocol_error(_cut(error.message, 1000), error.code))
            self.is_lost = True
            return unknown_outcome(item_id, "The MCP server did not answer the call.")
        except Exception as error:  # as above
            logger.debug("A call of the MCP server %s failed.", self.label, exc_info=error)
            self.is_lost = True
            return unknown_outcome(item_id, "The MCP server gave no valid answer to the call.")
        text = _cut(_text_of(result), most_bytes)
        if result.is_error:
            content = [{"type": "text", "text": text}]
            return Called(item_id=item_id, error={"type": "mcp_tool_execution_error", "content": content})
        return Called(item_id=item_id, output=text)


class McpConnections:
    """The connections of a server, one for each owner and MCP server while it is used, and for some time after."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], McpConnection] = {}

    @contextlib.asynccontextmanager
    async def of_spec(self, spec: McpServer, owner: str) -> AsyncIterator[McpConnection]:
        """Context of a connection to a server of the operator's file. It is kept for the owner's next response."""
        key = (owner, spec.label)
        connection = self._open.get(key)
        if connection is None or not connection.is_open:
            if connection is not None and not connection.num_users:
                connection.close()  # its program may still run; otherwise its last user closes it
            self._make_room()
            ended = asyncio.Event()
            transport = program_transport(spec, ended) if spec.command else http_transport(spec.url, spec.headers or {})
            connection = self._open[key] = McpConnection(spec.label, transport, ended)
        connection.num_users += 1
        try:
            yield connection
        finally:
            connection.num_users -= 1
            connection.idle_since_s = asyncio.get_running_loop().time()
            if not connection.is_open and not connection.num_users:
                connection.close()

    @contextlib.asynccontextmanager
    async def of_url(self, label: str, url: str, headers: Mapping[str, str]) -> AsyncIterator[McpConnection]:
        """Context of a connection to a server that a client has named."""
        connection = McpConnection(label, http_transport(url, headers, is_foreign=True))
        try:
            yield connection
        finally:
            await connection.closed()

    def _make_room(self) -> None:
        idle = [key for key, one in self._open.items() if not one.num_users]
        if len(self._open) >= _MOST and idle:
            self._open.pop(min(idle, key=lambda key: self._open[key].idle_since_s)).close()

    async def sweep(self) -> None:
        """Close connections that nobody uses. Never returns."""
        while True:
            await asyncio.sleep(_IDLE_S / 4)
            before_s = asyncio.get_running_loop().time() - _IDLE_S
            for key, one in list(self._open.items()):
                if not one.num_users and (not one.is_open or one.idle_since_s < before_s):
                    self._open.pop(key).close()

    async def close(self) -> None:
        await asyncio.gather(*(one.closed() for one in self._open.values()))


@contextlib.asynccontextmanager
async def http_transport(url: str, headers: Mapping[str, str], *, is_foreign: bool = False) -> AsyncIterator[Any]:
    """Context of the SDK's streams to a URL. `is_foreign`: it comes from a client."""
    guarded = GuardedTransport(is_public if is_foreign else None)
    timeout = httpx2.Timeout(_CONNECT_S, read=None)
    async with (
        httpx2.AsyncClient(transport=guarded, headers=dict(headers), timeout=timeout, trust_env=False) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


def _described(tool: mcp_types.Tool) -> DescribedTool | None:
    """Return a tool, unless it is too large for a prompt, or models cannot name it."""
    schema = tool.input_schema
    if not _NAME.fullmatch(tool.name) or is_deeper(schema, _DEPTH) or len(json.dumps(schema)) > _SCHEMA_BYTES:
        return None
    annotations = tool.annotations
    hints = annotations.model_dump(by_alias=True, exclude_none=True, mode="json") if annotations is not None else None
    if hints is not None and (is_deeper(hints, _DEPTH) or len(json.dumps(hints)) > _DESCRIPTION):
        return None
    try:
        msgspec.msgpack.encode([schema, hints])
    except OverflowError:  # an integer that the journal cannot keep
        return None
    return DescribedTool(
        name=tool.name, description=_cut(tool.description or "", _DESCRIPTION), schema=schema, annotations=hints
    )


def _text_of(result: mcp_types.CallToolResult) -> str:
    """Return what a model can read of a result."""
    parts = []
    for one in result.content:
        match one:
            case mcp_types.TextContent():
                parts.append(one.text)
            case mcp_types.EmbeddedResource(resource=mcp_types.TextResourceContents() as resource):
                parts.append(resource.text)
            case _:
                parts.append(f"[{one.type}: not shown]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def _cut(text: str, most_bytes: int) -> str:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= most_bytes:
        return encoded.decode()
    return f"{encoded[:most_bytes].decode(errors='ignore')}\n[cut: {most_bytes} of {len(encoded)} bytes]"
