"""The keys of a server in memory, and the authentication of requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.types import Scope

from tailrace.access.keys import Key, split_token
from tailrace.access.principal import Principal
from tailrace.access.quota import Quota
from tailrace.access.quotas import Quotas
from tailrace.access.sessions import Sessions, session_token
from tailrace.access.tickets import new_ticket, read_ticket
from tailrace.errors import Unauthenticated

__all__ = ["Keyring", "token_in"]

# Compared if the key id is unknown, so that a wrong id takes as long as a wrong secret.
_DUMMY_KEY = Key("", "nobody", revoked_s=0.0)
_HINT = "Send the header Authorization: Bearer tr_…. `tailrace keys create` creates a key."


class Keyring:
    """All keys, in memory, so that authentication needs no database.

    As long as no key was ever created, requests need none. If all keys are revoked, all requests are refused.
    """

    def __init__(self) -> None:
        self.sessions = Sessions()
        self.quotas = Quotas()
        self._keys: dict[str, Key] = {}
        self._principals: dict[str, Principal] = {}
        self._on_revoked: list[Callable[[str], None]] = []

    @property
    def is_empty(self) -> bool:
        """Return whether no key was ever created, so that all requests are anonymous."""
        return not self._keys

    def on_revoked(self, call: Callable[[str], None]) -> None:
        """Register a function that is called with the id of each key that is revoked from now on."""
        self._on_revoked.append(call)

    def update(self, keys: Iterable[Key], owners: Mapping[str, Quota] | None = None) -> None:
        """Add keys and owners' quotas that are new or have changed."""
        for owner, quota in (owners or {}).items():
            self.quotas.limit(("owner", owner), quota)
        for key in keys:
            before = self._keys.get(key.key_id)
            self._keys[key.key_id] = key
            self._principals[key.key_id] = Principal(key.owner, key.key_id, key.scopes)
            self.quotas.limit(("key", key.key_id), key.quota)
            if key.revoked_s is not None and before is not None and before.revoked_s is None:
                for call in self._on_revoked:
                    call(key.key_id)

    def authenticate(self, scope: Scope, headers: Headers) -> Principal:
        """Return the principal of a request.

        The key is in `Authorization: Bearer`, or in `x-api-key`, which Anthropic's clients send. Instead, a page of
        this server may send a session cookie, and a GET request or a WebSocket may have `?ticket=`.

        Raises: Unauthenticated.
        """
        if self.is_empty:
            return Principal()
        token = token_in(headers)
        if token is None:
            cookie = session_token(scope, headers)
            return self._principal_of_session(cookie) if cookie is not None else self._principal_of_ticket(scope)
        key_id, secret = split_token(token) or ("", "")
        key = self._keys.get(key_id, _DUMMY_KEY)
        if not key.accepts(secret, time.time()):
            raise Unauthenticated(f"This key is not valid. {_HINT}", param="authorization")
        return self._principals[key.key_id]

    def issue_ticket(self, principal: Principal, stream_id: str) -> str:
        """Return a ticket of the principal's key for a stream. Without keys a ticket is not needed, and opens nothing
        when there are keys later."""
        return new_ticket(self._keys.get(principal.key_id, _DUMMY_KEY), stream_id, time.time())

    def _principal_of_session(self, cookie: str) -> Principal:
        session = self.sessions.find(cookie, time.time())
        key = self._keys.get(session.key_id) if session is not None else None
        if session is None or key is None or not key.accepts_hash(session.secret_hash, time.time()):
            raise Unauthenticated("The session has ended. Sign in with a key.", param="cookie")
        return Principal(key.owner, key.key_id, key.scopes)

    def _principal_of_ticket(self, scope: Scope) -> Principal:
        may_have = scope["type"] == "websocket" or scope["method"] in ("GET", "HEAD")
        given = parse_qs(scope["query_string"].decode("latin-1")).get("ticket") if may_have else None
        if not given:
            raise Unauthenticated(f"This server needs a key. {_HINT}", param="authorization")
        ticket = read_ticket(given[0], self._keys, time.time())
        if ticket is None:
            raise Unauthenticated("This ticket is invalid or has expired. Request a new one.", param="ticket")
        return Principal(self._keys[ticket.key_id].owner, ticket.key_id, ("read",), ticket.stream_id)


def token_in(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key")
