"""A program on this machine as an MCP server, which the SDK's session talks to over pipes.

The SDK's own transport keeps a line of any length, hands on any number of messages, and inherits more variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator
from typing import TypeAlias

import anyio
import mcp_types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage

from tailrace_plugins.tool_loop.servers_file import McpServer

__all__ = ["program_transport"]

logger = logging.getLogger("tailrace.mcp")

_Streams: TypeAlias = tuple[
    MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]
]
_INHERITED = ("HOME", "LANG", "LC_ALL", "PATH", "TMPDIR", "TZ")  # no settings and no keys of this server
_LINE_BYTES = 4 * 2**20  # of one message
_IDLE_BYTES = 2**20  # that a program may write between two messages of ours, beside one message
_CLOSE_S = 2.0


@contextlib.asynccontextmanager
async def program_transport(spec: McpServer, ended: asyncio.Event) -> AsyncIterator[_Streams]:
    """Context of the streams of a program, which ends with it. `ended` is set when the program has no more to say.
    Raises: OSError if it cannot be started."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *spec.command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=inherited | dict(spec.env or {}),
        cwd=spec.directory,
        limit=_LINE_BYTES,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    to_session, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write_stream, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    num_bytes = 0  # since our last message

    async def read() -> None:
        nonlocal num_bytes
        async with to_session:
            with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                while line := await _line(stdout, spec.label):
                    num_bytes += len(line)
                    if num_bytes > _LINE_BYTES + _IDLE_BYTES:
                        logger.warning("The MCP server %s writes without end: it is stopped.", spec.label)
                        break
                    with contextlib.suppress(ValueError):  # a line that is no message, such as of a log
                        message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                        await to_session.send(SessionMessage(message))
            ended.set()

    async def write() -> None:
        nonlocal num_bytes
        async with from_session:
            with contextlib.suppress(OSError):
                async for sent in from_session:
                    num_bytes = 0
                    stdin.write(sent.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    await stdin.drain()

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        group.start_soon(write)
        try:
            yield read_stream, write_stream
        finally:
            with anyio.CancelScope(shield=True):
                await _stop(process)
            group.cancel_scope.cancel()


async def _line(stdout: asyncio.StreamReader, label: str) -> bytes:
    try:
        return await stdout.readline()
    except ValueError:
        logger.warning("The MCP server %s writes a line of more than %d bytes: it is stopped.", label, _LINE_BYTES)
        return b""


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a program and what it has started: first its input ends, then come the signals."""
    assert process.stdin is not None
    process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        if process.returncode is not None:
            return
    await process.wait()
