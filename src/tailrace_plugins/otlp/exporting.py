"""Sends traces and metrics while a server runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from urllib.parse import urlsplit

from tailrace.errors import ModelError
from tailrace.server import Opened, Options, Server
from tailrace_plugins.otlp.exporter_process import exporter_process
from tailrace_plugins.otlp.tracing import Tracing

__all__ = ["open_export"]


@asynccontextmanager
async def open_export(server: Server, options: Options) -> AsyncIterator[Opened]:
    """Raises: ModelError if the address is none, or a package is missing."""
    address = options["otlp"].rstrip("/")
    if not address:
        yield Opened()
        return
    _check(address)
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        if not _is_installed(package):
            raise ModelError(f"--otlp needs the package {package}: pip install 'tailrace[otlp]'.")
    async with exporter_process(address) as exporter:
        tracing = Tracing(exporter, has_text=options["otlp_text"])
        server.observe(tracing)
        server.add_headers(tracing.headers)
        yield Opened(exposed_headers=("traceparent",))


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # what it is in
        return False


def _check(address: str) -> None:
    try:
        url = urlsplit(address)
        is_address = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:  # the port
        is_address = False
    if not is_address or url.query or url.fragment:
        raise ModelError("--otlp takes an address such as http://127.0.0.1:4318.")
