"""Sessions: a browser signs in with a key once, and has a cookie from then on.

A page would have to store a key where scripts can read it; scripts cannot read an `HttpOnly` cookie. Browsers send
cookies also with requests that another site's page causes (CSRF). So the cookie counts only if the browser says that
the request is from a page of this server.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import msgspec
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import Scope

from tailrace.access.keys import hash_of

__all__ = [
    "LIFETIME_S",
    "Session",
    "Sessions",
    "cookie_name",
    "is_from_own_page",
    "is_own_origin",
    "new_session",
    "session_token",
]

LIFETIME_S = 14 * 86_400.0


class Session(msgspec.Struct, frozen=True):
    """A stored session: the hash of its token, and of the key's secret that started it. It is valid as long as that
    secret. Times are seconds since the epoch."""

    token_hash: bytes
    key_id: str
    secret_hash: bytes
    expires_s: float
    ended_s: float | None = None


class Sessions:
    """The active sessions, in memory."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, Session] = {}

    def update(self, sessions: Iterable[Session], now_s: float, *, is_whole: bool = False) -> None:
        """Add new sessions, and remove ended ones; with `is_whole` also all others."""
        if is_whole:
            self._by_hash.clear()
        for session in sessions:
            if session.ended_s is None and session.expires_s > now_s:
                self._by_hash[session.token_hash] = session
            else:
                self._by_hash.pop(session.token_hash, None)

    def find(self, token: str, now_s: float) -> Session | None:
        session = self._by_hash.get(hash_of(token))
        if session is None or session.expires_s > now_s:
            return session
        del self._by_hash[session.token_hash]
        return None


def new_session(key_id: str, secret_hash: bytes, now_s: float) -> tuple[str, Session]:
    """Return the only copy of a new session's token, and the session."""
    token = secrets.token_urlsafe(32)
    return token, Session(hash_of(token), key_id, secret_hash, now_s + LIFETIME_S)


def cookie_name(headers: Headers) -> str:
    """Return the cookie's name. It has the port, because browsers share cookies between the ports of a host."""
    port = headers.get("host", "").rpartition(":")[2]
    return f"tailrace-{port}" if port.isascii() and port.isdigit() else "tailrace"


def session_token(scope: Scope, headers: Headers) -> str | None:
    """Return the token in the request's cookie; None if there is none, or the request is not from a page of this
    server."""
    token = cookie_parser(headers.get("cookie", "")).get(cookie_name(headers))
    return token if token and is_from_own_page(scope, headers) else None


def is_from_own_page(scope: Scope, headers: Headers) -> bool:
    """Return whether a browser's request is from a page of this server. Browsers send Origin with WebSockets and all
    requests that change something, and Sec-Fetch-Site over trusted connections. A GET over plain HTTP may have neither;
    for those `SameSite=Strict` protects the cookie from other sites."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and not is_own_origin(origin, headers.get("host", "")):
        return False
    if site is not None:
        return site == "same-origin" or (site == "none" and _only_reads(scope))  # none: the user typed the address
    return origin is not None or _only_reads(scope)


def is_own_origin(origin: str, host: str) -> bool:
    """Return whether the header Origin names the same host and port as the header Host."""
    return origin.lower().partition("://")[2] == host.lower()


def _only_reads(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
