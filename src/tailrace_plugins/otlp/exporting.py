"""Sends traces and metrics while a server runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from tailrace.errors import ModelError
from tailrace.server import Opened, Options, Server

__all__ = ["open_export"]


@asynccontextmanager
async def open_export(server: Server, options: Options) -> AsyncIterator[Opened]:
    """Raises: ModelError if the address is none, or a package is missing."""
    address = options["otlp"].rstrip("/")
    if not address:
        yield Opened()
        return
    _check(address)
    try:
        from tailrace_plugins.otlp.collector import Collector
        from tailrace_plugins.otlp.tracing import Tracing
    except ImportError as error:
        raise ModelError(f"--otlp needs the package {error.name}: pip install 'tailrace[otlp]'.") from None
    collector = Collector(address)
    tracing = Tracing(collector, has_text=options["otlp_text"])
    server.observe(tracing)
    server.add_headers(tracing.headers)
    try:
        yield Opened(exposed_headers=("traceparent",))
    finally:
        await asyncio.to_thread(collector.close)


def _check(address: str) -> None:
    try:
        url = urlsplit(address)
        is_address = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:  # the port
        is_address = False
    if not is_address or url.query or url.fragment:
        raise ModelError("--otlp takes an address such as http://127.0.0.1:4318.")
