"""The file that names MCP servers, in the form that other programs have, too: `{"mcpServers": {"name": {…}}}`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tailrace.errors import ModelError

__all__ = ["LABEL", "McpServer", "read_servers"]

LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class _Server(msgspec.Struct, forbid_unknown_fields=True):
    command: str | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = {}
    type: str | None = None  # other programs need it
    tools: list[str] | None = None
    allow: list[str] | None = None


class _File(msgspec.Struct):
    servers: dict[str, _Server] = msgspec.field(name="mcpServers")


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server that the operator has named: a program, or a URL.

    `tools` are those that models may see, None for all. `allow` has the owners and keys that may use it, as
    `owner:NAME` and `key:ID`; None for all.
    """

    label: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None
    directory: str = "."
    url: str = ""
    headers: Mapping[str, str] | None = None
    tools: frozenset[str] | None = None
    allow: frozenset[str] | None = None

    def may_use(self, owner: str, key_id: str) -> bool:
        return self.allow is None or not self.allow.isdisjoint({f"owner:{owner}", f"key:{key_id}"})


def read_servers(path: Path, *, has_commands: bool) -> dict[str, McpServer]:
    """Return the servers of a file by their names. `${NAME}` in `env` and `headers` stands for a variable.

    Raises: ModelError if the file cannot be read or is not as it should be, or for a program without `has_commands`.
    """
    path = Path(os.path.expanduser(path))  # `Path.expanduser` raises RuntimeError if there is no such user
    try:
        servers = msgspec.json.decode(path.read_bytes(), type=_File).servers
    except OSError as error:
        raise ModelError(f"--mcp-servers {path} cannot be read: {error.strerror}.") from None
    except msgspec.MsgspecError as error:
        raise ModelError(f"--mcp-servers {path}: {error}.") from None
    return {label: _spec(path, label, server, has_commands=has_commands) for label, server in servers.items()}


def _spec(path: Path, label: str, server: _Server, *, has_commands: bool) -> McpServer:
    where = f"--mcp-servers {path}: the server {label!r}"
    if not LABEL.fullmatch(label):
        raise ModelError(f"{where} needs a name of 1 to 64 letters, digits, _ and -, with a letter first.")
    if (server.command is None) == (server.url is None):
        raise ModelError(f"{where} needs either `command` or `url`.")
    if server.url is not None and not re.match("https?://", server.url):
        raise ModelError(f"{where}: `url` should begin with http:// or https://.")
    if server.command is not None and not has_commands:
        raise ModelError(f"{where} is a program of this machine. Programs run only with --mcp-commands.")
    for one in server.allow or ():
        if not re.match("(owner|key):.", one):
            raise ModelError(f"{where}: `allow` has entries such as owner:alice and key:ID.")
    return McpServer(
        label,
        command=(server.command, *server.args) if server.command is not None else (),
        env=_filled(server.env, where),
        directory=str(path.parent / (server.cwd or ".")),
        url=server.url or "",
        headers=_filled(server.headers, where),
        tools=frozenset(server.tools) if server.tools is not None else None,
        allow=frozenset(server.allow) if server.allow is not None else None,
    )


def _filled(texts: Mapping[str, str], where: str) -> dict[str, str]:
    """Return texts with the values of variables. Raises: ModelError."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ModelError(f"{where} needs the variable {match[1]}, which is not set.")
        return os.environ[match[1]]

    return {name: _VARIABLE.sub(value, text) for name, text in texts.items()}
