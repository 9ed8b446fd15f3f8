"""Fetches images from addresses in questions: only from hosts that the operator allows, and never from private
networks.

A name is resolved once, all its addresses must be public, and the connection goes to one of these: a name that resolves
to something else a moment later changes nothing. Each redirect is checked like the first address. No proxy of the
environment is used, since it would resolve names by itself.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urljoin, urlsplit

from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.types import Image

if TYPE_CHECKING:
    import httpx  # a sixth of the imports of a server: only servers that fetch images import it

__all__ = ["MAX_BYTES", "TIMEOUT_S", "ImageFetcher", "is_public"]

MAX_BYTES = 20 * 2**20  # of all images of a request
TIMEOUT_S = 10.0  # for all images of a request, with redirects
_MAX_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}
_UNICAST = ipaddress.IPv6Network("2000::/3")  # the rest of the space has translated and special addresses

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


def is_public(address: str) -> bool:
    """Return whether an address belongs to a host of the public internet, also if IPv4 is wrapped into IPv6."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):  # a multicast address is outside of the unicast space
        return found in _UNICAST and found.is_global and found.sixtofour is None and found.teredo is None
    return found.is_global and not found.is_multicast


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class ImageFetcher:
    """Fetches from the hosts of `--fetch-images`: names, `*.example.com` for all below one, or `*` for any."""

    def __init__(
        self,
        hosts: str,
        *,
        resolve: Resolve = _resolve,
        is_allowed: Callable[[str], bool] = is_public,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._hosts = [one.strip().lower() for one in hosts.split(",") if one.strip()]
        if self._hosts:
            import httpx  # now, not while streams wait for an image; reading the certificates takes 20 to 60 ms

            self._certificates = httpx.create_ssl_context(trust_env=False)
        self._resolve = resolve
        self._is_allowed = is_allowed
        self._transport = transport

    async def fetch(self, images: tuple[Image, ...]) -> tuple[Image, ...]:
        """Return the images with the bytes at their addresses. Those without an address stay as they are.

        Raises: UnsupportedParameter if nothing is fetched from there, RequestError if one cannot be fetched.
        """
        param = next((image.param for image in images if image.url), "")
        if not param:
            return images
        if not self._hosts:
            raise UnsupportedParameter(
                f"{param}: this server does not fetch images. Send the image itself, as a data URL. Its operator can "
                "allow hosts with --fetch-images.",
                param=param,
            )
        import httpx

        fetched, room = [], MAX_BYTES
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                httpx.AsyncClient(
                    verify=self._certificates,
                    trust_env=False,
                    follow_redirects=False,
                    timeout=TIMEOUT_S,
                    transport=self._transport,
                ) as client,
            ):
                for image in images:
                    param = image.param
                    content = await self._follow(client, image, room) if image.url else image.content
                    room -= len(content)
                    fetched.append(replace(image, content=content, url=""))
        except TimeoutError:
            raise _failed(param, "it takes too long") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
            raise _failed(param, "its server does not answer") from None
        return tuple(fetched)

    async def _follow(self, client: httpx.AsyncClient, image: Image, room: int) -> bytes:
        """Return the bytes at the address of an image. Raises: as `_get`."""
        url = image.url
        for _ in range(1 + _MAX_REDIRECTS):
            found = await self._get(client, url, image.param, room)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise _failed(image.param, f"it has more than {_MAX_REDIRECTS} redirects")

    async def _get(self, client: httpx.AsyncClient, url: str, param: str, room: int) -> bytes | str:
        """Return the bytes at an address, or where it redirects. Raises: as `fetch`, and exceptions of the library."""
        parts = self._checked(url, param)
        host = parts.hostname or ""
        addresses = await self._resolve(host, _PORTS[parts.scheme])
        if not addresses or not all(map(self._is_allowed, addresses)):
            raise _refused(param)
        import httpx

        pinned = httpx.URL(url).copy_with(host=addresses[0], port=None, username="", password="")
        headers = {"host": host, "accept": "image/*", "accept-encoding": "identity"}
        async with client.stream("GET", pinned, headers=headers, extensions={"sni_hostname": host}) as answer:
            if answer.is_redirect:
                return str(answer.headers.get("location", ""))
            if answer.status_code != httpx.codes.OK:
                raise _failed(param, f"its server answers {answer.status_code}")
            content = bytearray()
            async for piece in answer.aiter_raw():
                content += piece
                if len(content) > room:
                    raise _failed(param, f"the images of a request have more than {MAX_BYTES // 2**20} MiB")
        return bytes(content)

    def _checked(self, url: str, param: str) -> SplitResult:
        """Return the parts of an address. Raises: UnsupportedParameter if nothing is fetched from there."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise _refused(param) from None
        host = (parts.hostname or "").rstrip(".")
        is_plain = parts.username is None and parts.password is None and host == parts.hostname
        if parts.scheme not in _PORTS or port not in (None, _PORTS[parts.scheme]) or not is_plain:
            raise _refused(param)
        if not any(one in ("*", host) or (one.startswith("*.") and host.endswith(one[1:])) for one in self._hosts):
            raise _refused(param)
        return parts


def _refused(param: str) -> UnsupportedParameter:
    return UnsupportedParameter(f"{param}: this server fetches no images from there.", param=param)


def _failed(param: str, reason: str) -> RequestError:
    return RequestError(f"{param}: this image cannot be fetched: {reason}.", param=param)
