"""A transport that sends requests to several servers in turn, like a load balancer without sticky sessions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import httpx

__all__ = ["Turns"]


class Turns(httpx.BaseTransport):
    """Sends each request to the next of these ports."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = itertools.cycle(ports)
        self._transport = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(port=next(self._ports))
        return self._transport.handle_request(request)

    def close(self) -> None:
        self._transport.close()
