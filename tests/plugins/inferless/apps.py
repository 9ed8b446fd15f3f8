"""Folders with an app, loaded and served in this process, which is restored afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import httpx

from tailrace_outer.apps.asgi import Lifespan
from tailrace_plugins.inferless.app import InferlessApp, load_app

TEXT = '{"TEXT": {"datatype": "STRING", "required": True, "shape": [1], "example": ["Hello"]}}'
STREAMING = f"INPUT_SCHEMA = {TEXT}\nIS_STREAMING_OUTPUT = True\n"
UNARY = f"INPUT_SCHEMA = {TEXT}\n"

Make = Callable[..., InferlessApp]


@contextlib.contextmanager
def apps(folder: Path) -> Iterator[Make]:
    """Return `make(app, schema, concurrency=…, files={…})`."""
    path, environment, modules = list(sys.path), dict(os.environ), set(sys.modules)

    def make(app: str, schema: str | None = STREAMING, *, files: dict[str, str] | None = None, **how: Any) -> Any:
        written = {"app.py": dedent(app), **(files or {})}
        if schema is not None:
            written["input_schema.py"] = dedent(schema)
        for name, text in written.items():
            (folder / name).write_text(text)
        return load_app(folder, **how)

    try:
        yield make
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if getattr(sys.modules[name], "__file__", None) is None or name in ("app", "input_schema"):
                del sys.modules[name]
        for name in set(os.environ) - set(environment):
            del os.environ[name]


@contextlib.asynccontextmanager
async def served(app: InferlessApp) -> AsyncIterator[httpx.AsyncClient]:
    lifespan = await Lifespan.start(app)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
            yield client
    finally:
        await lifespan.stop()


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of an answer, without the model's name and version."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line]
    return [{key: value for key, value in event.items() if not key.startswith("model_")} for event in events]


class Reader:
    """A client that reads a stream and may disconnect."""

    def __init__(self, app: InferlessApp, path: str, body: dict[str, Any]) -> None:
        self._asked = asyncio.Queue[dict[str, Any]]()
        self._asked.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        self._chunks = asyncio.Queue[bytes]()
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "asgi": {}}
        self._task = asyncio.get_running_loop().create_task(app(scope, self._asked.get, self._take))

    async def _take(self, message: Any) -> None:
        if message["type"] == "http.response.body" and message.get("body"):
            self._chunks.put_nowait(message["body"])

    async def event(self) -> dict[str, Any]:
        chunk = await self._chunks.get()
        event: dict[str, Any] = json.loads(chunk.decode().removeprefix("data: "))
        return event

    async def leave(self) -> None:
        self._asked.put_nowait({"type": "http.disconnect"})
        await asyncio.wait([self._task])
