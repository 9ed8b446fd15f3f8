"""The authentication of requests, by a key, a browser's session or a ticket."""

from __future__ import annotations

import time
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.types import Scope

from tailrace.access.keyring import NO_KEY, Keyring
from tailrace.access.principal import Principal
from tailrace.access.sessions import Sessions, session_token
from tailrace.access.tickets import new_ticket, read_ticket
from tailrace.errors import Unauthenticated

__all__ = ["Authentication", "token_in"]

_HINT = "Send the header Authorization: Bearer tr_…. `tailrace keys create` creates a key."


class Authentication:
    def __init__(self, keyring: Keyring, sessions: Sessions) -> None:
        self.keyring = keyring
        self._sessions = sessions

    def authenticate(self, scope: Scope, headers: Headers) -> Principal:
        """Return the principal of a request.

        The key is in `Authorization: Bearer`, or in `x-api-key`, which Anthropic's clients send. Instead, a page of
        this server may send a session cookie, and a GET request or a WebSocket may have `?ticket=`.

        Raises: Unauthenticated.
        """
        if self.keyring.is_empty:
            return Principal()
        token = token_in(headers)
        if token is not None:
            principal = self.keyring.principal_with(token)
            if principal is None:
                raise Unauthenticated(f"This key is not valid. {_HINT}", param="authorization")
            return principal
        cookie = session_token(scope, headers)
        return self._principal_of_session(cookie) if cookie is not None else self._principal_of_ticket(scope)

    def authenticate_again(self, scope: Scope, headers: Headers, before: Principal) -> Principal:
        """Return the principal of a WebSocket that is open. A ticket that has let it in is valid as long as its key.

        Raises: Unauthenticated if what has let it in is not valid any more.
        """
        if before.stream_id is not None:
            now = before if self.keyring.principal_of(before.key_id) is not None else None
        else:
            now = self.authenticate(scope, headers)
        if now is None or (now.owner, now.key_id) != (before.owner, before.key_id):
            raise Unauthenticated("What has opened this WebSocket is not valid any more.", param="authorization")
        return now

    def issue_ticket(self, principal: Principal, stream_id: str) -> str:
        """Return a ticket of the principal's key for a stream. Without keys a ticket is not needed, and opens nothing
        when there are keys later."""
        return new_ticket(self.keyring.keys.get(principal.key_id, NO_KEY), stream_id, time.time())

    def _principal_of_session(self, cookie: str) -> Principal:
        session = self._sessions.find(cookie, time.time())
        key = self.keyring.keys.get(session.key_id) if session is not None else None
        if session is None or key is None or not key.accepts_hash(session.secret_hash, time.time()):
            raise Unauthenticated("The session has ended. Sign in with a key.", param="cookie")
        return Principal(key.owner, key.key_id, key.scopes)

    def _principal_of_ticket(self, scope: Scope) -> Principal:
        may_have = scope["type"] == "websocket" or scope["method"] in ("GET", "HEAD")
        given = parse_qs(scope["query_string"].decode("latin-1")).get("ticket") if may_have else None
        if not given:
            raise Unauthenticated(f"This server needs a key. {_HINT}", param="authorization")
        ticket = read_ticket(given[0], self.keyring.keys, time.time())
        if ticket is None:
            raise Unauthenticated("This ticket is invalid or has expired. Request a new one.", param="ticket")
        return Principal(self.keyring.keys[ticket.key_id].owner, ticket.key_id, ("read",), ticket.stream_id)


def token_in(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key")
