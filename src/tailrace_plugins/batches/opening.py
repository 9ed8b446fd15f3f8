"""Opens the files and batches of a server, and closes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tailrace.server import Opened, Options, Server, Settings
from tailrace_plugins.batches.anthropic_routes import AnthropicRoutes
from tailrace_plugins.batches.batch_errors import NoBatches
from tailrace_plugins.batches.batch_files import Files
from tailrace_plugins.batches.batch_openapi import BATCHES_TAG, batch_paths
from tailrace_plugins.batches.batch_run import RowLimits
from tailrace_plugins.batches.batches import RowBatches
from tailrace_plugins.batches.extension import EXTENSION
from tailrace_plugins.batches.openai_routes import OpenAIRoutes
from tailrace_plugins.batches.row_runner import RowRunner

__all__ = ["open_batches"]


@asynccontextmanager
async def open_batches(server: Server, options: Options) -> AsyncIterator[Opened]:
    """Open the files and batches of a server, and continue those of an earlier process. Raises: StorageError."""
    if not options["batch_bytes"]:
        yield Opened([Route(path, _refuse) for path in ("/v1/files", "/v1/batches", "/v1/messages/batches")])
        return
    files = Files(await server.table_of(EXTENSION.name), most_bytes=options["batch_bytes"])
    rows = RowRunner(server, at_once=options["batch_rows_at_once"], has_room=files.has_room)
    async with asyncio.TaskGroup() as group:
        limits = RowLimits(options["batch_rows"], row_bytes=server.settings.body_bytes)
        batches = RowBatches(files, rows, group, limits)

        def use(settings: Settings) -> None:
            rows.slots.resize(options["batch_rows_at_once"])
            limits.most_rows, limits.row_bytes = options["batch_rows"], settings.body_bytes

        server.on_reload(use)
        await batches.start()
        file_bytes = options["batch_file_bytes"]
        routes = [
            *OpenAIRoutes(server, batches, file_bytes=file_bytes).table(),
            *AnthropicRoutes(server, batches, limits, file_bytes=file_bytes).table(),
        ]
        yield Opened(routes, batch_paths(), BATCHES_TAG, forget=batches.forget)
        batches.close()


async def _refuse(request: Request) -> Response:
    raise NoBatches("This server takes no batches: --batch-bytes is 0.")
