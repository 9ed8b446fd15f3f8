"""Servers for tests of durable streams: one, or two over one Redis that answer the requests of a client in turn."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence

import httpx
from tests.api.process import Server
from tests.testing.redis_server import delete_keys, shared_url
from tests.waiting import LONG_S

__all__ = ["KINDS", "Pair", "durable_server"]

KINDS = ("one server", "two servers")


class Pair(Server):
    """Two servers, as one. Their client sends each request to the other one than the request before."""

    def __init__(self, source: str, *flags: str) -> None:
        self._prefix = f"test-{secrets.token_hex(8)}"
        journal = ("--journal", f"{shared_url()}?prefix={self._prefix}")
        super().__init__(source, *flags, *journal)
        self.other = Server(source, *flags, *journal)

    def wait_ready(self, *, timeout_s: float = LONG_S) -> Pair:
        super().wait_ready(timeout_s=timeout_s)
        self.other.wait_ready(timeout_s=timeout_s)
        return self

    @property
    def http(self) -> httpx.Client:
        if self._client is None:
            turns = _Turns([self.port, self.other.port])
            self._client = httpx.Client(base_url=self.url, timeout=LONG_S, transport=turns)
        return self._client

    def close(self) -> None:
        try:
            self.other.close()
        finally:
            super().close()
            delete_keys(self._prefix)


class _Turns(httpx.BaseTransport):
    def __init__(self, ports: list[int]) -> None:
        self._ports = itertools.cycle(ports)
        self._transport = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(port=next(self._ports))
        return self._transport.handle_request(request)

    def close(self) -> None:
        self._transport.close()


def durable_server(kind: str, *, source: str = "scripted", flags: Sequence[str] = ()) -> Server:
    """Start a server of one of the `KINDS`."""
    return Pair(source, *flags) if kind == "two servers" else Server(source, *flags)
