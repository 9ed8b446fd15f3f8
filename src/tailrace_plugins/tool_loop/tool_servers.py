"""The MCP servers whose tools a server may call, and who may use which of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial

from msgspec.structs import replace

from tailrace.errors import Forbidden
from tailrace.server import Server
from tailrace_plugins.tool_loop.asked import McpTool
from tailrace_plugins.tool_loop.guarded_http import check_url
from tailrace_plugins.tool_loop.loop_rows import Begun, DescribedTool, Needs
from tailrace_plugins.tool_loop.mcp_connections import McpConnection, McpConnections
from tailrace_plugins.tool_loop.mcp_errors import ServerUnreachable
from tailrace_plugins.tool_loop.servers_file import McpServer

__all__ = ["Connect", "ToolServers"]

Connect = Callable[[str, str], contextlib.AbstractAsyncContextManager[McpConnection]]
"""Returns a context of a connection to the server with a label, for the call of a tool."""


class ToolServers:
    """`specs` are the servers that the operator has named, `hosts` those whose URLs clients may name."""

    def __init__(self, server: Server, specs: Mapping[str, McpServer], hosts: frozenset[str]) -> None:
        self._server = server
        self._specs = specs
        self._hosts = hosts
        self.connections = McpConnections()

    def labels(self, owner: str, key_id: str) -> list[str]:
        """Return the labels of the operator's servers that a key may use."""
        return [label for label, spec in self._specs.items() if spec.may_use(owner, key_id)]

    def lacks(self, needs: Needs) -> str:
        """Return what this server lacks to go on with a response, in words; an empty text if nothing."""
        for label in needs.labels:
            if label not in self._specs:
                return f"the MCP server {label} (--mcp-servers)"
        for url in needs.urls:
            try:
                check_url(url, self._hosts, "tools")
            except Forbidden:
                return "a host of its MCP servers (--mcp-hosts)"
        missing = [name for name in needs.models if name not in self._server.model_names]
        return f"the model {missing[0]}" if missing else ""

    async def tools_of(self, owner: str, key_id: str, tool: McpTool) -> list[DescribedTool]:
        """Return the tools of an MCP server that a request may have. Raises: RequestError, ServerUnreachable."""
        spec = self._allowed(owner, key_id, tool)
        connect = partial(self._connection, spec, tool.server_label, tool.server_url, tool.all_headers, owner)
        async with connect() as connection:
            is_old = connection.is_used
            try:
                found = await connection.tools()
            except ServerUnreachable:
                if not is_old:
                    raise
                async with connect() as fresh:  # the server may have left meanwhile
                    found = await fresh.tools()
        return [
            replace(one, needs_approval=tool.needs_approval(one))
            for one in found
            if tool.allows(one) and (spec is None or spec.tools is None or one.name in spec.tools)
        ]

    def _allowed(self, owner: str, key_id: str, tool: McpTool) -> McpServer | None:
        """Return the operator's server with this label; None if the request names a URL. Raises: Forbidden."""
        if tool.server_url is not None:
            check_url(tool.server_url, self._hosts, "tools")
            return None
        spec = self._specs.get(tool.server_label)
        if spec is None or not spec.may_use(owner, key_id):
            raise Forbidden("This key may use no MCP server with this label.", param="tools")
        return spec

    def connect(self, begun: Begun, headers: Mapping[str, Mapping[str, str]]) -> Connect:
        """Return what connects to the servers of a response. `headers` are those of the request, by label."""
        sender = begun.sender

        def connect(label: str, tool: str) -> contextlib.AbstractAsyncContextManager[McpConnection]:
            """Raises: RequestError if the tool may not be used, or not any more."""
            self._server.principal_of(sender)
            url, spec = begun.urls.get(label), self._specs.get(label)
            if url is not None:
                check_url(url, self._hosts, "tools")
                if label in begun.with_secrets and label not in headers:
                    text = "The headers for its server were not kept when another process took the response."
                    raise ServerUnreachable(text, param="tools")
            elif spec is None or not spec.may_use(sender.owner, sender.key_id):
                raise Forbidden("This key may not use its server any more.", param="tools")
            elif spec.tools is not None and tool not in spec.tools:
                raise Forbidden("Its server does not offer it any more.", param="tools")
            return self._connection(spec, label, url, headers.get(label, {}), sender.owner)

        return connect

    @contextlib.asynccontextmanager
    async def _connection(
        self, spec: McpServer | None, label: str, url: str | None, headers: Mapping[str, str], owner: str
    ) -> AsyncIterator[McpConnection]:
        if url is not None:
            async with self.connections.of_url(label, url, headers) as connection:
                yield connection
        else:
            assert spec is not None
            async with self.connections.of_spec(spec, owner) as connection:
                yield connection
