"""Adds the names that `--metrics-as` asks for to a server's metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from tailrace.server import Opened, Options, Server
from tailrace_outer.foreign_metrics.metric_families import add_families

__all__ = ["open_foreign_metrics"]


@asynccontextmanager
async def open_foreign_metrics(server: Server, options: Options) -> AsyncIterator[Opened]:
    yield Opened(on_metrics=partial(add_families, server.settings.metric_families))
