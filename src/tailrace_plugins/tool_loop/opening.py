"""Opens the tools of MCP servers, and closes them."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from tailrace.errors import ModelError
from tailrace.server import Opened, Options, Server
from tailrace_plugins.tool_loop.elsewhere import Elsewhere
from tailrace_plugins.tool_loop.extension import EXTENSION
from tailrace_plugins.tool_loop.journal import Journal
from tailrace_plugins.tool_loop.listing import LISTING_TAG, listing_paths, listing_route
from tailrace_plugins.tool_loop.servers_file import read_servers

__all__ = ["open_tools"]


@asynccontextmanager
async def open_tools(server: Server, options: Options) -> AsyncIterator[Opened]:
    """Open the tools of MCP servers, and continue the responses of an earlier process, or of servers that died.

    Raises: ModelError for a file with servers that cannot be used, StorageError.
    """
    hosts = frozenset(host.strip() for host in options["mcp_hosts"].split(",") if host.strip())
    table = await server.table_of(EXTENSION.name)
    if not options["mcp_servers"] and not hosts:
        elsewhere = Elsewhere(Journal(table))
        routes = [listing_route(lambda owner, key_id: [])]
        opened_none = Opened(routes, listing_paths(), LISTING_TAG, forget=elsewhere.forget)
        if table.is_shared:
            opened_none = replace(opened_none, takes=elsewhere.table, lane_takes=elsewhere.lanes)
        yield opened_none
        return
    if importlib.util.find_spec("mcp") is None:
        raise ModelError("--mcp-servers and --mcp-hosts need another package: pip install 'tailrace[mcp]'.")
    specs = {}
    if options["mcp_servers"]:
        specs = read_servers(Path(options["mcp_servers"]), has_commands=options["mcp_commands"])
    takes = await asyncio.to_thread(importlib.import_module, "tailrace_plugins.tool_loop.takes")  # it takes a second
    async with (
        asyncio.TaskGroup() as group,
        takes.open_loops(server, table, specs, hosts, options, group) as opened,
    ):
        routes = [listing_route(opened.labels)]
        yield Opened(
            routes,
            listing_paths(),
            LISTING_TAG,
            forget=opened.forget,
            drain=opened.drain,
            takes=opened.table,
            lane_takes=opened.lanes,
        )
