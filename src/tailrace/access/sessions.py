"""Sessions: a browser that has shown a key once, and shows a cookie from then on.

A page that kept a key would have to keep it where scripts can read it. A cookie that is `HttpOnly` they cannot read.
Browsers send a cookie by themselves, also when another site's page makes them ask. So it counts only where the browser
says that the request is from a page of this server.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

import msgspec
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import Scope

__all__ = ["LIFETIME_S", "Session", "Sessions", "cookie_name", "is_from_own_page", "new_session", "session_token"]

LIFETIME_S = 14 * 86_400.0


class Session(msgspec.Struct, frozen=True):
    """A session as it is kept: the hash of its token, and of the secret that it was begun with. It is good as long as
    that secret is. Times are seconds since the epoch."""

    token_hash: bytes
    key_id: str
    secret_hash: bytes
    expires_s: float
    ended_s: float | None = None


class Sessions:
    """The sessions that have not ended, in memory."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, Session] = {}

    def update(self, sessions: Iterable[Session], now_s: float) -> None:
        """Take in those that are new or have ended."""
        for session in sessions:
            if session.ended_s is None and session.expires_s > now_s:
                self._by_hash[session.token_hash] = session
            else:
                self._by_hash.pop(session.token_hash, None)

    def drop(self, session: Session) -> None:
        self._by_hash.pop(session.token_hash, None)

    def find(self, token: str, now_s: float) -> Session | None:
        session = self._by_hash.get(hash_of_token(token))
        if session is None or session.expires_s > now_s:
            return session
        del self._by_hash[session.token_hash]
        return None


def new_session(key_id: str, secret_hash: bytes, now_s: float) -> tuple[str, Session]:
    """A session, and the only copy of its token."""
    token = secrets.token_urlsafe(32)
    return token, Session(hash_of_token(token), key_id, secret_hash, now_s + LIFETIME_S)


def hash_of_token(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def cookie_name(headers: Headers) -> str:
    """Cookies do not know ports: servers on several ports of a machine need names of their own."""
    port = headers.get("host", "").rpartition(":")[2]
    return f"tailrace-{port}" if port.isascii() and port.isdigit() else "tailrace"


def session_token(scope: Scope, headers: Headers) -> str | None:
    """The token in the request's cookie. None where there is no cookie, or where the browser does not say that one of
    this server's pages has sent it."""
    token = cookie_parser(headers.get("cookie", "")).get(cookie_name(headers))
    return token if token and is_from_own_page(scope, headers) else None


def is_from_own_page(scope: Scope, headers: Headers) -> bool:
    """Browsers send an Origin with all that changes something and with WebSockets, and Sec-Fetch-Site where the
    connection is trusted. A GET over plain HTTP may have neither; `SameSite=Strict` keeps other sites' out."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and origin.lower().partition("://")[2] != headers.get("host", "").lower():
        return False
    if site is not None:
        return site == "same-origin" or (site == "none" and _only_reads(scope))  # none: somebody typed the address
    return origin is not None or _only_reads(scope)


def _only_reads(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
