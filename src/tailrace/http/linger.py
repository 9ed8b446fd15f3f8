"""The header X-Tailrace-Linger: how long a stream continues without a reader."""

from __future__ import annotations

import re

from starlette.requests import HTTPConnection

from tailrace.errors import RequestError

__all__ = ["linger_of"]

_LINGER = re.compile(r"[0-9]{1,5}", re.ASCII)


def linger_of(request: HTTPConnection) -> float | None:
    """Return the seconds; None without the header. Raises: RequestError."""
    given = request.headers.get("x-tailrace-linger")
    if given is None:
        return None
    if not _LINGER.fullmatch(given) or int(given) > 86_400:
        raise RequestError("X-Tailrace-Linger must be whole seconds, at most 86400.", param="x-tailrace-linger")
    return float(given)
