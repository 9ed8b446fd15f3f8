"""The WebSocket wires: sockets in and out of the dialects `chatbot` (at `/`) and `websocket` (at `/v1/ws`).

Every socket is one task that always reads, so that its client's leaving is noticed at once, with children that write:
one for the chatbot's answers, one for each stream that is followed on `/v1/ws`. Writers pull from the logs with readers
of their own and wait in `send` while the socket has no room; nothing is queued for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from tailrace.api.channel import StreamChannel
from tailrace.api.chat_socket import ChatSocket
from tailrace.dialects import native
from tailrace.errors import Draining, QueueFull, UpgradeRequired
from tailrace.generation.models import Models
from tailrace.http.websocket import Socket, end_of
from tailrace.settings import Settings

__all__ = ["Sockets"]

_RETRY_S = 5.0  # for a client whose socket is refused


class Sockets:
    """Both wires, over all models; a chatbot talks to the first."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self._models = models
        self._settings = settings
        self._num_open = 0

    def table(self) -> list[BaseRoute]:
        """Their routes; the last one is for WebSockets that ask for nothing that is here."""
        return [
            WebSocketRoute("/", _Endpoint(partial(self._run, self._chat))),
            WebSocketRoute("/v1/ws", _Endpoint(partial(self._run, self._follow))),
            Route("/v1/ws", _Endpoint(_require_upgrade), methods=["GET"]),
            WebSocketRoute("/{path:path}", _Endpoint(_find_nothing)),
        ]

    async def _run(
        self, talk: Callable[[Socket], Awaitable[None]], scope: Scope, receive: Receive, send: Send
    ) -> None:  # fmt: skip
        """Accept a socket, talk, and say goodbye. Raises: AdmissionError before the socket is accepted."""
        if self._models.first.generator.gate.is_draining:
            raise Draining("The server is shutting down.", retry_after_s=_RETRY_S)
        if self._num_open >= self._settings.ws_sockets:
            raise QueueFull("As many WebSockets are open as may be.", retry_after_s=_RETRY_S)
        self._num_open += 1
        try:
            await receive()  # websocket.connect, which says nothing
            await send({"type": "websocket.accept", "headers": []})
            over = await end_of(talk(Socket(scope, receive, send, idle_s=self._settings.ws_idle_s)))
            if over.close is not None:
                await send({"type": "websocket.close", "code": over.close.code, "reason": over.close.reason})
        finally:
            self._num_open -= 1

    async def _chat(self, socket: Socket) -> None:
        chat = ChatSocket(self._models, self._settings, socket)
        async with asyncio.TaskGroup() as group:
            group.create_task(chat.answer_all())
            await chat.listen()

    async def _follow(self, socket: Socket) -> None:
        async with asyncio.TaskGroup() as group:
            await StreamChannel(self._models, self._settings, socket, group).obey_all()


class _Endpoint:
    """An ASGI application, and not a function: Starlette would take that for one that wants its own WebSocket class."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _require_upgrade(scope: Scope, receive: Receive, send: Send) -> None:
    status, body = native.encode_error(UpgradeRequired("This is a WebSocket; open it with one."))
    headers = {"upgrade": "websocket", "connection": "upgrade"}
    await Response(body, status, headers, "application/json")(scope, receive, send)


async def _find_nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404)
