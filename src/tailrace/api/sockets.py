"""The WebSockets: `/v1/ws`, and those of wires: chats, and sockets with lanes.

Each socket has one task that always reads, so that a disconnect is noticed at once, and child tasks that write: one for
the answers of a chat, one for each followed stream. Each writer reads a log with its own cursor, and
waits in `send` while the socket is full, so no events are queued for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from tailrace.access.principal import principal_of
from tailrace.access.tickets import LIFETIME_S
from tailrace.api.channel import StreamChannel
from tailrace.api.chat_socket import ChatSocket
from tailrace.api.lane_socket import LaneSocket
from tailrace.api.stream_starts import StreamStarts
from tailrace.assembly.models import Models
from tailrace.dialects import ServerFacts, SocketChat, Wire, native
from tailrace.dialects.wire import SocketLanes
from tailrace.errors import SHUTTING_DOWN, Draining, QueueFull, UpgradeRequired
from tailrace.http.accepted_websocket import Socket, end_of
from tailrace.http.lane_streams import LaneTake
from tailrace.http.wires import ServedWires
from tailrace.server import Server
from tailrace.types import ANONYMOUS

__all__ = ["Sockets"]

_RETRY_S = 5.0  # Retry-After of a refused socket
_MAX_OF_TICKETS = 8  # sockets that tickets for one stream have open at once, beside those of its owner


class Sockets:
    """All WebSockets. Chats use the first model."""

    def __init__(
        self,
        models: Models,
        server: Server,
        starts: StreamStarts,
        takes: Mapping[str, LaneTake] | None = None,
    ) -> None:
        self._takes = takes or {}  # of sockets with lanes, by path
        self._models = models
        self._server = server
        self._starts = starts
        self._num_open = 0
        self._num_open_of: Counter[tuple[str, str]] = Counter()  # by owner, and the stream of a ticket

    def table(self) -> list[BaseRoute]:
        """Return the routes without those of wires. The last one refuses WebSockets to other paths."""
        return [
            WebSocketRoute("/v1/ws", _Endpoint(partial(self._run, self._follow))),
            Route("/v1/ws", _Endpoint(_require_upgrade), methods=["GET"]),
            WebSocketRoute("/{path:path}", _Endpoint(_not_found)),
        ]

    def of_wires(self, wires: ServedWires) -> list[BaseRoute]:
        talks: list[tuple[str, Callable[[Socket], Awaitable[None]]]] = []
        for wire in wires.all:
            talks += [(path, partial(self._chat, wire.name, begin)) for path, begin in wire.sockets.items()]
            talks += [
                (path, partial(self._lanes, wire, lanes, self._takes.get(path))) for path, lanes in wire.lanes.items()
            ]
        return [WebSocketRoute(path, _Endpoint(partial(self._run, talk))) for path, talk in talks]

    async def _run(
        self, run_socket: Callable[[Socket], Awaitable[None]], scope: Scope, receive: Receive, send: Send
    ) -> None:  # fmt: skip
        """Accept a socket, run it, and close it. Raises: AdmissionError before the socket is accepted."""
        if self._models.first.generator.gate.is_draining:
            raise Draining(SHUTTING_DOWN, retry_after_s=_RETRY_S)
        if self._num_open >= self._server.settings.ws_sockets:
            raise QueueFull("Too many WebSockets are open.", retry_after_s=_RETRY_S)
        principal, idle_s = principal_of(scope), self._server.settings.ws_idle_s
        most = self._server.settings.ws_owner_sockets
        if principal.stream_id is not None:
            most, idle_s = _MAX_OF_TICKETS, min(idle_s or LIFETIME_S, LIFETIME_S)
        whose = principal.owner, principal.stream_id or ""
        if principal.owner != ANONYMOUS and self._num_open_of[whose] >= most:
            raise QueueFull("Too many of your WebSockets are open.", retry_after_s=_RETRY_S)
        self._num_open += 1
        self._num_open_of[whose] += 1
        try:
            await receive()  # websocket.connect
            await send({"type": "websocket.accept", "headers": []})
            over = await end_of(run_socket(Socket(scope, receive, send, idle_s=idle_s)))
            if over.close is not None:
                await send({"type": "websocket.close", "code": over.close.code, "reason": over.close.reason})
        finally:
            self._num_open -= 1
            self._num_open_of[whose] -= 1
            if not self._num_open_of[whose]:
                del self._num_open_of[whose]

    async def _chat(self, wire: str, begin: Callable[[ServerFacts], SocketChat], socket: Socket) -> None:
        chat = ChatSocket(self._models, self._server.settings, socket, begin(self._models.first.names[0]), wire=wire)
        async with asyncio.TaskGroup() as group:
            group.create_task(chat.answer_all())
            await chat.listen()

    async def _lanes(self, wire: Wire, lanes: SocketLanes, take: LaneTake | None, socket: Socket) -> None:
        answering = LaneSocket(wire, lanes, self._models, self._server, self._starts, socket, take)
        over = await end_of(answering.run())
        if over.close is None and await socket.is_done():
            await answering.cancel_own()  # nothing is followed any more, and nothing ends this
        raise over

    async def _follow(self, socket: Socket) -> None:
        async with asyncio.TaskGroup() as group:
            await StreamChannel(self._models, self._server, socket, group).run()


class _Endpoint:
    """An ASGI application. It is a class because Starlette passes its own WebSocket class to functions."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _require_upgrade(scope: Scope, receive: Receive, send: Send) -> None:
    status, body = native.encode_error(UpgradeRequired("This path needs a WebSocket connection."))
    headers = {"upgrade": "websocket", "connection": "upgrade"}
    await Response(body, status, headers, "application/json")(scope, receive, send)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404)
