"""The keys of a server in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from tailrace.access.keys import Key, split_token
from tailrace.access.principal import Principal

__all__ = ["NO_KEY", "Keyring"]

# Compared if the key id is unknown, so that a wrong id takes as long as a wrong secret.
NO_KEY = Key("", "nobody", revoked_s=0.0)


class Keyring:
    """All keys, in memory, so that authentication needs no database.

    As long as no key was ever created, requests need none. If all keys are revoked, all requests are refused.
    """

    def __init__(self) -> None:
        self._keys: dict[str, Key] = {}
        self._principals: dict[str, Principal] = {}
        self._on_revoked: list[Callable[[str], None]] = []
        self.is_unknown = False  # whether there may be keys that could not be read

    @property
    def is_empty(self) -> bool:
        """Return whether no key was ever created, so that all requests are anonymous."""
        return not self._keys and not self.is_unknown

    @property
    def keys(self) -> Mapping[str, Key]:
        """The keys by id, also those that are not valid any more."""
        return self._keys

    def on_revoked(self, call: Callable[[str], None]) -> None:
        """Register a function that is called with the id of each key that is revoked from now on."""
        self._on_revoked.append(call)

    def update(self, keys: Iterable[Key]) -> None:
        """Add keys that are new or have changed."""
        for key in keys:
            before = self._keys.get(key.key_id)
            self._keys[key.key_id] = key
            self._principals[key.key_id] = Principal(key.owner, key.key_id, key.scopes)
            if key.revoked_s is not None and before is not None and before.revoked_s is None:
                for call in self._on_revoked:
                    call(key.key_id)

    def principal_of(self, key_id: str) -> Principal | None:
        """Return the principal of a key without its secret, or the anonymous one for no key; None if it is not valid
        now."""
        if not key_id:
            return Principal() if self.is_empty else None
        key = self._keys.get(key_id, NO_KEY)
        return self._principals[key_id] if key.state(time.time()) == "active" else None

    def principal_with(self, token: str) -> Principal | None:
        """Return the principal of the key with this token; None if it is not valid now."""
        key_id, secret = split_token(token) or ("", "")
        key = self._keys.get(key_id, NO_KEY)
        return self._principals[key.key_id] if key.accepts(secret, time.time()) else None
