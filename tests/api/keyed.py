"""A server with keys in this process, with its clients and WebSockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp, Message
from tests.records.databases import with_tables

from tailrace.api.lifecycle import build_app
from tailrace.assembly.service import Service, start_service
from tailrace.assembly.source import find_source
from tailrace.models import NoProgress
from tailrace.records.records_service import Records
from tailrace.server import Opened, Server, open_extensions
from tailrace.settings import Settings

__all__ = ["House", "OpenSocket", "serving_with_keys"]


class House:
    """A server in this process, its keys and its clients."""

    def __init__(self, service: Service, database: str) -> None:
        self.database = database
        self.records = self.twin()
        self.records.keys()  # opens the database
        self.service = service
        self.extensions: Sequence[Opened] = ()
        self.app = self.build_app()

    def server(self, settings: Settings | None = None, records: Records | None = None) -> Server:
        records = records or self.records
        models = self.service.models
        return Server(settings or Settings(), self.service.store, records, models)

    def build_app(
        self, settings: Settings | None = None, records: Records | None = None, server: Server | None = None
    ) -> ASGIApp:
        """Return an application over the same streams and extensions, with other settings or other records."""
        server = server or self.server(settings, records)
        return build_app(self.service.models, server, self.extensions, records or self.records)

    @contextlib.asynccontextmanager
    async def opened(self, settings: Settings | None = None, records: Records | None = None) -> AsyncIterator[None]:
        """Answer with such an application, and with new extensions."""
        server = self.server(settings, records)
        async with open_extensions(server) as self.extensions:
            self.app = self.build_app(records=records, server=server)
            yield

    def twin(self) -> Records:
        """Return the records of another server with the same database."""
        return Records(Settings(database=self.database))

    def key(self, owner: str = "me", **given: Any) -> str:  # Any: of KeyStore.create
        made = self.records.keys().create(owner, **given)
        self.records.quotas.update([made.key], {})
        self.records.keyring.update([made.key])
        return made.token

    def revoke(self, token: str) -> None:
        self.records.keyring.update([self.records.keys().revoke(token.split("_")[1])])

    def client(self, token: str | None = None, **headers: str) -> httpx.AsyncClient:
        sent = headers if token is None else {"authorization": f"Bearer {token}", **headers}
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://localhost", headers=sent)

    async def open_socket(self, path: str, query: str = "", token: str | None = None) -> OpenSocket:
        socket = OpenSocket(self, path, query, token)
        await socket.begin()
        return socket


class OpenSocket:
    """A WebSocket that is opened, or refused by the server."""

    def __init__(self, house: House, path: str, query: str, token: str | None) -> None:
        headers = [(b"host", b"localhost")]
        if token is not None:
            headers.append((b"authorization", f"Bearer {token}".encode()))
        self._scope = {
            "type": "websocket", "path": path, "raw_path": path.encode(), "query_string": query.encode(),
            "headers": headers, "scheme": "ws", "client": ("127.0.0.1", 1), "server": ("localhost", 80),
            "subprotocols": [], "root_path": "", "extensions": {"websocket.http.response": {}},
        }  # fmt: skip
        self._app = house.app
        self.sent = asyncio.Queue[Message]()
        self.to_receive = asyncio.Queue[Message]()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        self.to_receive.put_nowait({"type": "websocket.connect"})
        self._task = asyncio.create_task(self._app(self._scope, self.to_receive.get, self.sent.put))  # type: ignore[arg-type]

    def say(self, text: str) -> None:
        self.to_receive.put_nowait({"type": "websocket.receive", "text": text})

    async def wait(self, kind: str) -> Message:
        async with asyncio.timeout(120):
            while (message := await self.sent.get())["type"] != kind:
                pass
        return message

    async def close(self) -> None:
        assert self._task is not None
        self.to_receive.put_nowait({"type": "websocket.disconnect", "code": 1000})
        await asyncio.wait([self._task], timeout=120)
        assert self._task.done()


@contextlib.asynccontextmanager
async def serving_with_keys(directory: Path, model: str = "scripted:tokens_per_s=200") -> AsyncIterator[House]:
    source = await asyncio.to_thread(find_source, model, NoProgress())
    settings = Settings(kv_tokens=4_000_000, load_s=60.0)
    async with start_service(source, settings, data_path=directory) as service:
        house = House(service, with_tables(directory / "records.sqlite"))
        observers = service.models.observers
        house.records.conversations.observe(observers, service.store)
        async with house.opened(), asyncio.TaskGroup() as group:
            keeping = group.create_task(house.records.conversations.write_until_cancelled())
            async with house.records.recording(observers, lambda: (), service.store, directory):
                try:
                    yield house
                finally:
                    for run in list(service.generator.live):
                        run.cancel()
            keeping.cancel()  # last, as in a server: the last rows of requests wait for the turns of conversations
    house.records.close()
