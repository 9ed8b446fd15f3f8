"""What a request says beside its path and its body: who had it sent, and what its headers ask for on any wire."""

from __future__ import annotations

import re
from dataclasses import replace
from urllib.parse import urlsplit

from starlette.requests import Request

from tailrace.errors import RequestError
from tailrace.types import GenerateRequest

__all__ = ["is_from_elsewhere", "is_own_address", "may_generate", "with_headers"]

_LINGER = re.compile(r"[0-9]{1,5}", re.ASCII)


def is_own_address(text: str, host: str) -> bool:
    """Whether it is a URL of this server, as the client knows it."""
    try:
        url = urlsplit(text)
    except ValueError:
        return False
    port = {"http": ":80", "https": ":443"}.get(url.scheme)
    if port is None:
        return False
    return url.netloc.rpartition("@")[2].lower().removesuffix(port) == host.lower().removesuffix(port)


def is_from_elsewhere(request: Request) -> bool:
    """Whether a page of another origin had a browser ask, which sends no Origin with a GET. What tells is a header of
    the browser's own; to plain HTTP on other hosts it sends none, and the page's address may tell instead."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("none", "same-origin")
    referer = request.headers.get("referer")
    try:
        return referer is not None and urlsplit(referer).netloc != request.headers.get("host")
    except ValueError:  # an address that no page has
        return True


def may_generate(request: Request) -> bool:
    """Whether a request is worth loading a model for."""
    return request.method != "HEAD" and (request.method != "GET" or not is_from_elsewhere(request))


def with_headers(wanted: GenerateRequest, request: Request) -> GenerateRequest:
    """The request with what its client asked in headers, whatever the wire: whether another answer will do when the
    engine is lost, and how long the stream runs on with nobody reading. With an Idempotency-Key that is as long as on
    `/v1/streams`, since whoever sends one means to come back. Raises: RequestError."""
    continuity = request.headers.get("x-tailrace-continuity", "any")
    if continuity not in ("any", "exact"):
        raise RequestError("X-Tailrace-Continuity is any or exact.", param="x-tailrace-continuity")
    if continuity == "exact":
        wanted = replace(wanted, exact=True)
    given = request.headers.get("x-tailrace-linger")
    if given is None:
        return replace(wanted, on_disconnect="detach") if "idempotency-key" in request.headers else wanted
    if not _LINGER.fullmatch(given) or int(given) > 86_400:
        raise RequestError("X-Tailrace-Linger is a number of seconds, at most 86400.", param="x-tailrace-linger")
    return replace(wanted, on_disconnect="detach", linger_s=float(given))
