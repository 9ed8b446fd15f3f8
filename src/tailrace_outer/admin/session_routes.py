"""`/v1/session`: sign-in of browsers. A browser sends its key once, and gets a cookie."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from tailrace.access.audit import note
from tailrace.access.authentication import token_in
from tailrace.access.keys import hash_of, split_token
from tailrace.access.principal import Principal, principal_of
from tailrace.access.sessions import LIFETIME_S, cookie_name, is_from_own_page, new_session, session_token
from tailrace.api.routes import route
from tailrace.dialects.bodies import JsonBody, to_json
from tailrace.errors import Forbidden, RequestError, Unauthenticated
from tailrace.http.asgi_answers import JsonAnswer
from tailrace.records.records_service import Records

__all__ = ["SessionRoutes"]


class SessionRoutes:
    """The routes of sessions. Signing in needs the key in its usual header; a cookie cannot renew itself."""

    def __init__(self, records: Records, root_path: str) -> None:
        self._records = records
        self._root_path = root_path

    def table(self) -> list[Route]:
        return [
            route("GET", "/v1/session", self._show),
            route("POST", "/v1/session", self._begin),
            route("DELETE", "/v1/session", self._end),
        ]

    async def _show(self, request: Request) -> ASGIApp:
        return JsonAnswer(to_json(_session_json(principal_of(request.scope))))

    async def _begin(self, request: Request) -> ASGIApp:
        principal = principal_of(request.scope)
        if not principal.key_id:
            raise RequestError("This server needs no key.")
        if not is_from_own_page(request.scope, request.headers):
            raise Forbidden("Only a page of this server can sign in.", param="origin")
        _, secret = split_token(token_in(request.headers) or "") or ("", "")
        if not secret:
            raise Unauthenticated("Send the key in Authorization: Bearer to sign in.", param="authorization")
        token, session = new_session(principal.key_id, hash_of(secret), time.time())
        await self._records.ask(self._records.sessions, lambda sessions: sessions.add(session))
        await self._records.apply_own_change()
        note("session.begin", "done", request.scope)
        headers = {"set-cookie": self._cookie(request, token, int(LIFETIME_S)), "cache-control": "no-store"}
        return JsonAnswer(to_json(_session_json(principal)), 201, headers)

    async def _end(self, request: Request) -> ASGIApp:
        token = session_token(request.scope, request.headers)
        session = self._records.active_sessions.find(token, time.time()) if token else None
        if session is not None:
            await self._records.ask(self._records.sessions, lambda sessions: sessions.end(session.token_hash))
            await self._records.apply_own_change()
            note("session.end", "done", request.scope)
        headers = {"set-cookie": self._cookie(request, "", 0)}
        return JsonAnswer(to_json({"object": "session.ended", "ended": session is not None}), 200, headers)

    def _cookie(self, request: Request, token: str, lifetime_s: int) -> str:
        """Return the Set-Cookie header. Behind a TLS proxy, only the browser's Origin shows that TLS is used."""
        is_secure = request.url.scheme == "https" or request.headers.get("origin", "").startswith("https:")
        name, path = cookie_name(request.headers), f"{self._root_path}/"
        parts = f"{name}={token}; Path={path}; Max-Age={lifetime_s}; HttpOnly; SameSite=Strict"
        return f"{parts}; Secure" if is_secure else parts


def _session_json(principal: Principal) -> JsonBody:
    """`scopes` is null if there are no keys: then everything is allowed."""
    scopes = list(principal.scopes) if principal.scopes is not None else None
    return {"object": "session", "owner": principal.owner, "key_id": principal.key_id or None, "scopes": scopes}
