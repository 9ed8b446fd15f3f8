"""Opens the durable streams of a server, and closes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tailrace.server import LocalNotes, Opened, Options, Server, SharedLog
from tailrace_plugins.durable_streams.durable_answers import EXPOSED_HEADERS
from tailrace_plugins.durable_streams.durable_openapi import DURABLE_TAG, durable_paths
from tailrace_plugins.durable_streams.durable_requests import SINGLE_HEADERS, owned_key
from tailrace_plugins.durable_streams.durable_routes import DurableRoutes
from tailrace_plugins.durable_streams.durable_streams import DurableStreams
from tailrace_plugins.durable_streams.extension import EXTENSION
from tailrace_plugins.durable_streams.local_durable_streams import open_local
from tailrace_plugins.durable_streams.shared_durable_streams import SharedDurableStreams

__all__ = ["open_durable", "open_streams"]


@asynccontextmanager
async def open_streams(server: Server, options: Options) -> AsyncIterator[Opened]:
    """Open the streams that the server keeps. Raises: StorageError, JournalDamaged if they cannot be read."""
    budget_bytes = options["durable_bytes"]
    async with open_durable(await server.notes_of(EXTENSION.name), budget_bytes) as streams:

        async def forget(owner: str) -> Mapping[str, int]:
            num_streams = await streams.perform(lambda store: store.delete_below(owned_key(owner, b"")))
            return {"durable_streams": num_streams}

        if not budget_bytes:
            yield Opened(forget=forget, drain=streams.close)
            return
        routes = DurableRoutes(streams, server, options).table()
        yield Opened(
            routes,
            durable_paths(),
            DURABLE_TAG,
            EXPOSED_HEADERS,
            forget,
            streams.close,
            single_headers=SINGLE_HEADERS,
        )


@asynccontextmanager
async def open_durable(notes: LocalNotes | SharedLog, budget_bytes: int) -> AsyncIterator[DurableStreams]:
    """Open durable streams. A shared log is read only if there is a budget: without one, `perform` reads it.

    Raises: StorageError, JournalDamaged if they cannot be read.
    """
    if isinstance(notes, LocalNotes):
        yield open_local(notes, budget_bytes)
        return
    streams = SharedDurableStreams(notes)
    if budget_bytes:
        await streams.load(budget_bytes)
    notes.listen(streams)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(streams.run())
        yield streams
        running.cancel()
