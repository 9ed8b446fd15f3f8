"""Servers with MCP tools, and models that are scripted to call them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types.responses import Response
from openai.types.responses.response_output_item import McpApprovalRequest, McpCall
from tests.api.process import Server
from tests.waiting import LONG_S, until

__all__ = ["COUNTING", "Json", "Tools", "asks_of", "calls_of", "client_of"]

Json = dict[str, Any]  # Any: JSON

COUNTING = Path(__file__).with_name("counting_server.py")

# "call append {…}" lets the model call that tool with these arguments; several calls are in one line, separated by ;
_RULES: list[Json] = [{"when": "<tool_response>", "say": "The tool has answered."}, {"when": ".", "say": "Hello."}]


class Tools:
    """The files of a server with the counting MCP server, whose label is `count`. `turns` has the arguments of the
    calls of each turn of the model, as (tool, arguments)."""

    def __init__(self, path: Path, turns: list[list[tuple[str, Json]]], *, tools: list[Json] | None = None) -> None:
        self.path = path
        self.counts = path / "counts"
        self.tokens_per_s = 0  # of the model; 0 is as fast as it can
        rules = [
            {"when": ".", "turn": number, "calls": [{"name": name, "arguments": given} for name, given in calls]}
            for number, calls in enumerate(turns)
        ]
        (path / "script.json").write_text(json.dumps({"rules": [*rules, *_RULES]}))
        args = [str(COUNTING), str(self.counts)]
        if tools is not None:
            (path / "tools.json").write_text(json.dumps(tools))
            args.append(str(path / "tools.json"))
        self.servers: Json = {"count": {"command": sys.executable, "args": args}}
        self.write()

    def write(self) -> None:
        (self.path / "mcp.json").write_text(json.dumps({"mcpServers": self.servers}))

    @property
    def source(self) -> str:
        return f"scripted:script={self.path / 'script.json'},tokens_per_s={self.tokens_per_s}"

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--mcp-servers", str(self.path / "mcp.json"), "--mcp-commands", "--data-dir", str(self.path / "data"))

    def start(self, *more: str) -> Server:
        return Server(self.source, *self.flags, *more).wait_ready()

    def counted(self) -> list[str]:
        """Return the names of the tools that were called, in order."""
        lines = self.counts.read_text().splitlines() if self.counts.exists() else []
        return [json.loads(line)[0] for line in lines]

    def wait_counted(self, number: int) -> None:
        until(lambda: len(self.counted()) >= number)


def client_of(server: Server, **more: Any) -> OpenAI:  # Any: of each option
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=LONG_S, **more)


def calls_of(response: Response) -> list[McpCall]:
    return [item for item in response.output if isinstance(item, McpCall)]


def asks_of(response: Response) -> list[McpApprovalRequest]:
    return [item for item in response.output if isinstance(item, McpApprovalRequest)]
