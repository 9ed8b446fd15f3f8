"""An OpenAI-compatible server that is not tailrace: it repeats its prompt, or misbehaves as the prompt says."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.waiting import until

__all__ = ["OpenAIServer"]


def _chunk(content: str, finish_reason: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': content}, 'finish_reason': finish_reason}]})}\n\n"


class OpenAIServer:
    """Listens at `url`, in its own thread, while its context is open."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []  # Any: what JSON can be
        self.keys: set[str] = set()
        app = Starlette(
            routes=[Route("/v1/models", self._models), Route("/v1/chat/completions", self._chat, methods=["POST"])]
        )
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})

    def __enter__(self) -> OpenAIServer:
        self._thread.start()
        until(lambda: self._server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        self._socket.close()

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "some-model", "owned_by": "somebody"}]})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.add(request.headers.get("authorization", ""))
        prompt = body["messages"][-1]["content"]
        if prompt == "refuse":
            return JSONResponse({"error": {"message": "There is \x1b[31mno such thing."}}, 400)
        if prompt == "in one piece":
            return JSONResponse({"choices": [{"message": {"content": f"You said: {prompt}"}}]})
        return StreamingResponse(self._answer(prompt), media_type="text/event-stream")

    def _answer(self, prompt: str) -> Iterator[str]:
        yield _chunk("You said")
        if prompt == "fail":
            yield 'data: {"error": {"message": "out of memory"}}\n\n'
        elif prompt != "break off":
            yield _chunk(f": {prompt}")
            yield _chunk("", "stop")
            yield "data: [DONE]\n\n"
