"""A WebSocket client on the server's event loop, without a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, cast

from starlette.routing import Router
from starlette.types import ASGIApp, Message
from tests.generation.harness import Harness
from tests.waiting import LONG_S

from tailrace.access.authentication import Authentication
from tailrace.api.sockets import Sockets
from tailrace.api.stream_starts import StreamStarts
from tailrace.assembly.models import Models
from tailrace.assembly.served import Served
from tailrace.http.edge import Edge
from tailrace.http.wires import ServedWires
from tailrace.server import Server
from tailrace.settings import Settings
from tailrace.streams.opening import Store
from tailrace.transport.websocket_parts import SEND_MANY
from tailrace_outer.scripted.scripted_models import find_scripted

__all__ = ["SocketClient", "app_of", "models_of", "server_of"]

_MOMENT_S = 0.001  # of virtual time: it passes when everybody else waits


class SocketClient:
    """Opens a WebSocket of an application. `frames` has the received frames. While `is_reading` is false it does not
    read, and the server cannot send a single frame."""

    def __init__(
        self, app: ASGIApp, path: str = "/v1/ws", headers: Mapping[str, str] | None = None, *, takes_many: bool = True
    ) -> None:
        self._app = app
        fields = {"host": "localhost", **(headers or {})}
        self.scope: dict[str, Any] = {
            "type": "websocket",
            "path": path,
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), text.encode()) for name, text in fields.items()],
            "extensions": {"websocket.http.response": {}, **({SEND_MANY: {}} if takes_many else {})},
        }
        self._to_server: asyncio.Queue[Message] = asyncio.Queue()
        self._room = asyncio.Event()
        self._room.set()
        self._is_gone = False
        self.frames: list[str] = []
        self._close: tuple[int, str] | None = None
        self.task: asyncio.Task[None]
        self.answer: dict[bytes, bytes] = {}  # the headers with which the server accepted or refused
        self.status: int | None = None  # 101 if it accepted
        self.body = b""

    async def __aenter__(self) -> SocketClient:
        self._to_server.put_nowait({"type": "websocket.connect"})
        self.task = asyncio.create_task(self._talk())
        await self.settle()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.disconnect()
        await asyncio.wait_for(self.task, LONG_S)

    async def _talk(self) -> None:
        await self._app(self.scope, self._to_server.get, self._take)

    async def _take(self, message: Message) -> None:
        kind = message["type"]
        if kind in ("websocket.send", SEND_MANY):
            await self._room.wait()
            if self._is_gone or self._close is not None:
                raise ConnectionResetError
            texts = [frame.decode() for frame in message["frames"]] if kind == SEND_MANY else [message["text"]]
            self.frames += texts
        elif kind == "websocket.close":
            self._close = (message["code"], message.get("reason", ""))
        elif kind == "websocket.http.response.body":
            self.body += message["body"]
        else:
            self.answer = dict(message["headers"])
            self.status = message.get("status", 101)

    def is_open(self) -> bool:
        return self._close is None

    @property
    def closing(self) -> tuple[int, str]:
        """Code and reason with which the server has closed the socket."""
        assert self._close is not None
        return self._close

    @property
    def is_reading(self) -> bool:
        return self._room.is_set()

    @is_reading.setter
    def is_reading(self, value: bool) -> None:
        if value:
            self._room.set()
        else:
            self._room.clear()

    def send(self, content: object) -> None:
        """Send a text frame: text as it is, anything else as JSON."""
        text = content if isinstance(content, str) else json.dumps(content)
        self._to_server.put_nowait({"type": "websocket.receive", "text": text})

    def send_bytes(self, content: bytes) -> None:
        self._to_server.put_nowait({"type": "websocket.receive", "bytes": content})

    def disconnect(self, code: int = 1006) -> None:
        """Lose the connection, or close it with another code."""
        self._is_gone = True
        self._room.set()
        self._to_server.put_nowait({"type": "websocket.disconnect", "code": code})

    async def settle(self) -> None:
        """Let the server run until it waits."""
        await asyncio.sleep(_MOMENT_S)

    async def ask(self, content: object) -> None:
        self.send(content)
        await self.settle()

    def read(self) -> list[str]:
        """Return the new frames."""
        frames, self.frames = self.frames, []
        return frames

    def read_json(self) -> list[dict[str, Any]]:  # Any: of JSON
        return [json.loads(frame) for frame in self.read()]


def models_of(harness: Harness) -> Models:
    """Return the models of a server that has only the model of this generator."""
    served = Served(find_scripted("scripted").card, harness.engine.spec, Settings())
    served.generator, served.is_loaded = harness.generator, True
    return Models([served], Settings(), asyncio.TaskGroup())


def server_of(harness: Harness, settings: Settings | None = None) -> Server:
    """Return the server of this generator's streams."""
    return Server(settings or Settings(), cast(Store, harness.generator.store))


def app_of(
    harness: Harness,
    *,
    authentication: Authentication | None = None,
    **settings: Any,  # Any: of any of the settings' types
) -> ASGIApp:
    given = Settings(**settings)
    models, server = models_of(harness), server_of(harness, given)
    sockets = Sockets(models, server, StreamStarts(models, server))
    return Edge(Router([*sockets.of_wires(ServedWires()), *sockets.table()]), given, authentication)
