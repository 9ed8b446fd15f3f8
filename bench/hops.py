"""Counts the modules and functions of tailrace that one request uses: `python bench/hops.py`.

A streamed chat on OpenAI's wire is sent four times over ASGI in this process, with the scripted engine and a journal.
`sys.setprofile` records all but the first one, from the request to the last byte. What only some use is of no chat:
tasks of the server that run now and then. Engine workers are other processes, and are not recorded.
Comprehensions and lambdas do not count as functions. -v prints each function with its number of calls.

`--resume redis://127.0.0.1:6379/0` counts another request: a reader goes on with a stream that runs at a server in
another process, from its second event to its end. It has a prefix of its own in that Redis, and deletes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import operator
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

import httpx
from starlette.types import ASGIApp

import tailrace
from tailrace.api.lifecycle import build_app
from tailrace.assembly.service import start_service
from tailrace.assembly.source import find_source
from tailrace.models.progress import NoProgress
from tailrace.server import Server
from tailrace.settings import Settings

_CORE = Path(tailrace.__file__).parent
_ROOTS = (f"{_CORE}/", f"{_CORE.parent}/tailrace_outer/")

_LEASE_S = 60.0  # so long that no server loses its streams while this slow process counts

Request: TypeAlias = tuple[str, str, bytes, list[tuple[bytes, bytes]]]
"""Method, path, body and headers."""


@contextmanager
def watching(seen: Counter[CodeType]) -> Iterator[None]:
    """Count the calls of tailrace's functions in this thread and in threads that start meanwhile."""

    def on_call(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_ROOTS):
            seen[frame.f_code] += 1

    threading.setprofile(on_call)
    sys.setprofile(on_call)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def ask(app: ASGIApp, method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Send a request, and return the complete answer."""
    answer = bytearray()
    is_sent, is_over = False, asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal is_sent
        if is_sent:
            await is_over.wait()
            return {"type": "http.disconnect"}
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        answer.extend(message.get("body", b""))
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            is_over.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 4_000),
        "server": ("127.0.0.1", 8_080),
    }
    await app(scope, receive, send)
    return bytes(answer)


@asynccontextmanager
async def _other_server(journal: str) -> AsyncIterator[httpx.AsyncClient]:
    """A server in another process, over the same log store."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = (
        "-m", "tailrace", "serve", "scripted:tokens_per_s=20", "--port", str(port), "--journal", journal,
        "--log-level", "error", "--lease-s", str(_LEASE_S),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as path:
        server = await asyncio.create_subprocess_exec(
            sys.executable, *command, "--data-dir", path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                async with asyncio.timeout(120):
                    while not await _is_ready(client):  # noqa: ASYNC110  # another process says nothing
                        await asyncio.sleep(0.1)
                yield client
        finally:
            server.terminate()
            await server.wait()


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/readyz")).is_success
    except httpx.TransportError:
        return False


async def _resumption(other: httpx.AsyncClient) -> Request:
    """Begin a stream there, and return the request that goes on with it."""
    body = {"prompt": "Hello", "max_tokens": 100}
    begun = await other.post("/v1/streams", json=body, headers={"x-tailrace-linger": "60"})
    path, seen = f"/v1/streams/{begun.headers['x-stream-id']}/events", b""
    async with other.stream("GET", path) as answer:
        async for piece in answer.aiter_bytes():
            seen += piece
            if seen.count(b"\nid: ") >= 2:
                break
    return "GET", path, b"", [(b"host", b"localhost"), (b"last-event-id", b"2")]


async def _count(settings: Settings, prepare: Callable[[], Awaitable[Request]]) -> Counter[CodeType]:
    """Return the functions that each of three requests uses, and how often at least."""
    found: list[Counter[CodeType]] = []
    with tempfile.TemporaryDirectory() as path:
        async with start_service(find_source("scripted", NoProgress()), settings, data_path=Path(path)) as service:
            app = build_app(service.models, Server(settings, service.store))
            await ask(app, *await prepare())
            for _ in range(3):
                request, calls = await prepare(), Counter[CodeType]()
                with watching(calls):
                    answer = await ask(app, *request)
                assert b"[DONE]" in answer or b"event: done" in answer, answer
                found.append(calls)
    return functools.reduce(operator.and_, found)


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python bench/hops.py")
    parser.add_argument("--resume", metavar="REDIS", help="count a resume through this Redis")
    parser.add_argument("-v", action="store_true", help="name the functions")
    asked = parser.parse_args()
    if asked.resume:
        journal = f"{asked.resume}?prefix=hops{secrets.token_hex(4)}"
        async with _other_server(journal) as other:
            seen = await _count(Settings(journal=journal, lease_s=_LEASE_S), functools.partial(_resumption, other))
    else:
        seen = await _count(Settings(), _chat)
    seen = Counter({code: num_calls for code, num_calls in seen.items() if not code.co_name.startswith("<")})
    files = Counter(_shown(code) for code in seen)
    for file, num_functions in sorted(files.items()):
        print(f"{num_functions:4} {file}")
        if asked.v:
            for code in sorted((code for code in seen if _shown(code) == file), key=_line):
                print(f"{'':9}{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name} {seen[code]}")
    print(f"{len(files)} files, {len(seen)} functions, {sum(seen.values())} calls")


async def _chat() -> Request:
    body = b'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16, "stream": true}'
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    return "POST", "/v1/chat/completions", body, headers


def _shown(code: CodeType) -> str:
    """Return the path of a function's file, in the core or beside it."""
    path = Path(code.co_filename)
    return path.relative_to(_CORE if path.is_relative_to(_CORE) else _CORE.parent).as_posix()


def _line(code: CodeType) -> int:
    return code.co_firstlineno


if __name__ == "__main__":
    asyncio.run(main())
