"""The tools of MCP servers as an extension of the server, and its settings."""

from __future__ import annotations

from tailrace.extensions import Extension, Setting

__all__ = ["EXTENSION"]

EXTENSION = Extension(
    "mcp",
    "tailrace_plugins.tool_loop.opening:open_tools",
    settings=(
        Setting("mcp_servers", "", "File that names the MCP servers whose tools models may call (docs/mcp.md).", str),
        Setting(
            "mcp_commands",
            False,
            "Also start MCP servers that are programs on this machine, where --mcp-servers names them.",
            bool,
        ),
        Setting(
            "mcp_hosts",
            "",
            "Hosts whose MCP servers requests may name with server_url, separated by commas. *: all public ones.",
            str,
            is_list=True,
        ),
        Setting("mcp_calls", 16, "Calls of MCP tools that one response makes at most.", int, least=1, reloads=True),
        Setting("mcp_call_s", 60.0, "How long a call of an MCP tool may take.", float, least=0.1, reloads=True),
        Setting(
            "mcp_result_bytes",
            65_536,
            "Text that a model gets of a tool's result; the rest is cut off.",
            int,
            least=1,
            reloads=True,
        ),
    ),
)
