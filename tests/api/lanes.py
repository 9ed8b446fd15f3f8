"""Clients of the WebSocket of `/v1/responses`, and what they read."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from tests.api.socket_client import SocketClient
from tests.generation.harness import Harness

from tailrace.access.principal import PRINCIPAL, Principal
from tailrace.types import ANONYMOUS

__all__ = ["PATH", "Frames", "Owned", "client_of", "create", "id_of", "state", "types"]

PATH = "/v1/responses"
Frames = list[dict[str, Any]]


def create(count: int = 8, **fields: object) -> dict[str, object]:
    return {"type": "response.create", "input": "Hi", "max_output_tokens": count, "seed": 1, **fields}


def client_of(app: ASGIApp, query: str = "", **given: Any) -> SocketClient:
    client = SocketClient(app, PATH, **given)
    client.scope["query_string"] = query.encode()
    return client


def types(frames: Frames) -> list[str]:
    return [frame["type"] for frame in frames]


def id_of(frames: Frames) -> str:
    return next(str(frame["response"]["id"]) for frame in frames if frame["type"] == "response.created")


class Owned:
    """An application whose requests have the principal of their header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.principals: dict[str, Principal] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = dict(scope["headers"]).get(b"x-owner", b"").decode()
        if name:
            scope[PRINCIPAL] = self.principals.get(name, Principal(name))
        await self._app(scope, receive, send)


async def state(harness: Harness, response_id: str, owner: str = ANONYMOUS) -> str:
    log = await harness.generator.store.read(owner, response_id.removeprefix("resp_"), 0)
    return log.status
