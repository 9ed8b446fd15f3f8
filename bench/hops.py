"""Counts the modules and functions of tailrace that one streamed chat request uses: `python bench/hops.py`.

A chat on OpenAI's wire is sent four times over ASGI in this process, with the scripted engine and a journal.
`sys.setprofile` records all but the first one, from the request to the last byte. What only some use is of no chat:
tasks of the server that run now and then. Engine workers are other processes, and are not recorded.
Comprehensions and lambdas do not count as functions. -v prints each function with its number of calls.
"""

from __future__ import annotations

import asyncio
import functools
import operator
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from starlette.types import ASGIApp

import tailrace
from tailrace.api.lifecycle import build_app
from tailrace.assembly.service import start_service
from tailrace.assembly.source import find_source
from tailrace.models.progress import NoProgress
from tailrace.server import Server
from tailrace.settings import Settings

_ROOT = Path(tailrace.__file__).parent
_BODY = b'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16, "stream": true}'
_HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]


@contextmanager
def watching(seen: Counter[CodeType]) -> Iterator[None]:
    """Count the calls of tailrace's functions in this thread and in threads that start meanwhile."""

    def on_call(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(_ROOT)):
            seen[frame.f_code] += 1

    threading.setprofile(on_call)
    sys.setprofile(on_call)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def ask(app: ASGIApp) -> bytes:
    """Send a chat, and return the complete answer."""
    answer = bytearray()
    is_sent, is_over = False, asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal is_sent
        if is_sent:
            await is_over.wait()
            return {"type": "http.disconnect"}
        is_sent = True
        return {"type": "http.request", "body": _BODY, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        answer.extend(message.get("body", b""))
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            is_over.set()

    path = "/v1/chat/completions"
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": _HEADERS,
        "client": ("127.0.0.1", 4_000),
        "server": ("127.0.0.1", 8_080),
    }
    await app(scope, receive, send)
    return bytes(answer)


async def main() -> None:
    chats: list[Counter[CodeType]] = [Counter(), Counter(), Counter()]
    settings = Settings()
    with tempfile.TemporaryDirectory() as path:
        async with start_service(find_source("scripted", NoProgress()), settings, data_path=Path(path)) as service:
            app = build_app(service.models, Server(settings, service.store))
            await ask(app)
            for calls in chats:
                with watching(calls):
                    answer = await ask(app)
                assert answer.endswith(b"data: [DONE]\n\n"), answer
    seen = functools.reduce(operator.and_, chats)  # the least number of calls of each
    seen = Counter({code: num_calls for code, num_calls in seen.items() if not code.co_name.startswith("<")})
    files = Counter(Path(code.co_filename).relative_to(_ROOT).as_posix() for code in seen)
    for file, num_functions in sorted(files.items()):
        print(f"{num_functions:4} {file}")
        if "-v" in sys.argv:
            for code in sorted((code for code in seen if code.co_filename.endswith("/" + file)), key=_line):
                print(f"{'':9}{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name} {seen[code]}")
    print(f"{len(files)} files, {len(seen)} functions, {sum(seen.values())} calls")


def _line(code: CodeType) -> int:
    return code.co_firstlineno


if __name__ == "__main__":
    asyncio.run(main())
