"""A model is in use from the moment when a request is read, so it is not unloaded before its stream exists."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest
from starlette.routing import Router
from starlette.types import ASGIApp
from tests.api.socket_client import SocketClient, models_of, server_of
from tests.generation.harness import Harness
from tests.streams.virtual_time import run as run_scenario

from tailrace.api.routes import Routes
from tailrace.api.sockets import Sockets
from tailrace.api.stream_starts import StreamStarts
from tailrace.assembly.served import Served
from tailrace.http.edge import Edge
from tailrace.http.wires import ServedWires
from tailrace.settings import Settings
from tailrace.streams import MemoryLogStore
from tailrace.streams.log_store import Lease
from tailrace.types import Record


class _SlowStore(MemoryLogStore):
    """A log store that needs time to open a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.may_open = asyncio.Event()

    async def open(self, record: Record) -> Lease:
        await self.may_open.wait()
        return await super().open(record)


def use_of(served: Served) -> tuple[int, bool, bool]:
    """Return the number of arriving requests, whether streams run, and whether the model is idle."""
    return served.num_arriving, served.generator.is_busy, served.is_idle


async def by_http(app: ASGIApp, until: Callable[[], Awaitable[None]]) -> None:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        asked = asyncio.create_task(client.post("/v1/streams", json={"prompt": "Hi", "max_tokens": 3}))
        await until()
        assert (await asked).status_code == 201


async def by_channel(app: ASGIApp, until: Callable[[], Awaitable[None]]) -> None:
    async with SocketClient(app) as client:
        await client.ask({"type": "create", "id": "a", "prompt": "Hi", "max_tokens": 3})
        await until()


async def by_chatbot(app: ASGIApp, until: Callable[[], Awaitable[None]]) -> None:
    async with SocketClient(app, "/") as client:
        await client.ask("Hi")
        await until()


@pytest.mark.parametrize("ask", [by_http, by_channel, by_chatbot])
def test_a_model_is_in_use_while_a_request_is_made(
    ask: Callable[[ASGIApp, Callable[[], Awaitable[None]]], Awaitable[None]],
) -> None:
    async def scenario() -> None:
        store, settings = _SlowStore(), Settings()
        harness = Harness(store=store)
        models = models_of(harness)
        wires, server = ServedWires(), server_of(harness, settings)
        starts = StreamStarts(models, server)
        sockets, routes = Sockets(models, server, starts), Routes(wires, models, server, starts)
        app = Edge(Router([*routes.table(), *sockets.of_wires(wires), *sockets.table()]), settings)
        served = models.first
        assert use_of(served) == (0, False, True)

        async def until_made() -> None:
            await asyncio.sleep(1)
            assert use_of(served) == (1, False, False)
            store.may_open.set()
            await asyncio.sleep(1)
            assert use_of(served) == (0, True, False)

        await ask(app, until_made)
        for _ in range(3):
            harness.engine.step()
        assert use_of(served) == (0, False, True)

    run_scenario(scenario())
