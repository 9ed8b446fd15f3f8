"""Headers of every wire: the origin of a request, continuity, linger time and ignored fields."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from msgspec.structs import replace
from starlette.requests import HTTPConnection

from tailrace.access.principal import RequestT
from tailrace.dialects.shapes import path_of
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.http.linger import linger_of
from tailrace.types import GenerateRequest

__all__ = [
    "ignored_header",
    "is_background",
    "is_cross_origin",
    "is_own_address",
    "may_generate",
    "with_headers",
    "with_priority",
]

_MAX_NAMED = 10


def is_own_address(text: str, host: str) -> bool:
    """Return whether a text is a URL of this server. `host` is the Host header."""
    try:
        url = urlsplit(text)
    except ValueError:
        return False
    port = {"http": ":80", "https": ":443"}.get(url.scheme)
    if port is None:
        return False
    return url.netloc.rpartition("@")[2].lower().removesuffix(port) == host.lower().removesuffix(port)


def is_cross_origin(request: HTTPConnection) -> bool:
    """Return whether a page of another origin caused a GET request, for which browsers send no Origin. They send
    Sec-Fetch-Site, but not to other hosts over plain HTTP; then the Referer counts."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("none", "same-origin")
    referer = request.headers.get("referer")
    try:
        return referer is not None and urlsplit(referer).netloc != request.headers.get("host")
    except ValueError:  # not a URL
        return True


def may_generate(request: HTTPConnection) -> bool:
    """Return whether a request may load a model and begin a stream. The edge has checked the Origin of WebSockets."""
    method = request.scope.get("method")
    return method != "HEAD" and (method != "GET" or not is_cross_origin(request))


def is_background(request: HTTPConnection) -> bool:
    """Return whether a request waits for others. Raises: RequestError."""
    priority = request.headers.get("x-tailrace-priority", "live")
    if priority not in ("live", "background"):
        raise RequestError("X-Tailrace-Priority must be live or background.", param="x-tailrace-priority")
    return priority == "background"


def with_priority(call: RequestT, request: HTTPConnection) -> RequestT:
    """Apply the header X-Tailrace-Priority to a call. Raises: RequestError."""
    return replace(call, is_background=True) if is_background(request) else call


def with_headers(call: GenerateRequest, request: HTTPConnection) -> GenerateRequest:
    """Apply the headers X-Tailrace-Continuity, X-Tailrace-Linger and X-Tailrace-Priority to a call. With an
    Idempotency-Key the default linger time is that of `/v1/streams`, because the client intends to come back. Raises:
    RequestError."""
    call = with_priority(call, request)
    continuity = request.headers.get("x-tailrace-continuity", "any")
    if continuity not in ("any", "exact"):
        raise RequestError("X-Tailrace-Continuity must be any or exact.", param="x-tailrace-continuity")
    if continuity == "exact":
        call = replace(call, exact=True)
    linger_s = linger_of(request)
    if linger_s is None:
        return replace(call, on_disconnect="detach") if "idempotency-key" in request.headers else call
    return replace(call, on_disconnect="detach", linger_s=linger_s)


def ignored_header(ignored: Sequence[str], *, is_strict: bool) -> dict[str, str]:
    """Return the header that names what has no effect, or another effect than asked for. Raises: UnsupportedParameter
    with --strict."""
    if ignored and is_strict:
        what = f"{ignored[0]} has no effect here, and --strict refuses it."
        raise UnsupportedParameter(what, param=path_of(ignored[0]))
    named = list(dict.fromkeys(ignored))
    if len(named) > _MAX_NAMED:
        named[_MAX_NAMED:] = [f"and {len(named) - _MAX_NAMED} more"]
    return {"x-tailrace-ignored": ", ".join(named)} if named else {}
