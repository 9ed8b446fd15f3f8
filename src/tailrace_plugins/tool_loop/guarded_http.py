"""HTTP requests to MCP servers: limited answers, and for URLs of clients only addresses of the public internet."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Collection
from urllib.parse import urlsplit

import httpx2

from tailrace.errors import Forbidden
from tailrace.server import is_public as is_public_host

__all__ = ["GuardedTransport", "check_url", "is_public"]

_ANSWER_BYTES = 4 * 2**20
_LEAVE_S = 2.0  # for the end of a session
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Return whether an address belongs to the public internet. NAT64 addresses are what names of IPv4 hosts have in a
    network without IPv4."""
    address = address.partition("%")[0]
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address) and found in _NAT64:
        address = str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF))
    return is_public_host(address)


def check_url(url: str, hosts: Collection[str], param: str) -> None:
    """Raises: Forbidden for a URL of a client that is not `https` or whose host is not among `hosts`."""
    try:
        parts = urlsplit(url)
        host, is_plain = parts.hostname or "", parts.username is None and parts.port in (None, 443)
    except ValueError:
        host, is_plain = "", False
    if not host or parts.scheme != "https" or not is_plain:
        raise Forbidden("server_url should be https://HOST/PATH, without a user and a port.", param=param)
    if "*" not in hosts and host not in hosts:
        raise Forbidden("This server connects to no MCP server at this host (--mcp-hosts).", param=param)


class GuardedTransport(httpx2.AsyncBaseTransport):
    """Sends requests, and cuts off answers that are too long. `may_reach` says which addresses are allowed: the name is
    looked up here, and the connection goes to the address that was checked."""

    def __init__(self, may_reach: Callable[[str], bool] | None = None) -> None:
        self._inner = httpx2.AsyncHTTPTransport(retries=0, trust_env=may_reach is None)
        self._may_reach = may_reach

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self._may_reach is not None:
            host = request.url.host
            request.extensions["sni_hostname"] = host
            request.url = request.url.copy_with(host=await self._address(host, request.url.port or 443))
        request.headers["accept-encoding"] = "identity"
        if request.method == "DELETE":
            return await self._end_session(request)
        response = await self._inner.handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":  # a few bytes could become any number
            await response.aclose()
            raise httpx2.ReadError("the answer is compressed")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Limited(response.stream)
        return response

    async def _end_session(self, request: httpx2.Request) -> httpx2.Response:
        """A server that does not answer must not hold the session open. Nobody needs the body. Raises: TimeoutError."""
        async with asyncio.timeout(_LEAVE_S):
            response = await self._inner.handle_async_request(request)
            await response.aclose()
        return httpx2.Response(response.status_code)

    async def _address(self, host: str, port: int) -> str:
        assert self._may_reach is not None
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            raise httpx2.ConnectError("the host is not found") from None
        addresses = [str(one[4][0]) for one in found]
        if not addresses or not all(map(self._may_reach, addresses)):
            raise httpx2.ConnectError("the host has an address that is not public")
        return addresses[0]

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Limited(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in self._stream:
            num_bytes += len(part)
            if num_bytes > _ANSWER_BYTES:
                raise httpx2.ReadError("the answer is too long")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
