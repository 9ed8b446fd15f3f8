"""API keys. Only the hash of a key's secret is stored."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

import msgspec

from tailrace.access.quota import NO_LIMITS, Quota
from tailrace.types import ANONYMOUS

__all__ = [
    "ACTIONS",
    "DEFAULT_SCOPES",
    "Key",
    "NewKey",
    "check_owner",
    "check_scopes",
    "hash_of",
    "new_key",
    "rotated",
    "split_token",
]

ACTIONS = ("generate", "read", "admin", "metrics")
DEFAULT_SCOPES = ("generate", "read")

_TOKEN = re.compile(r"tr_([a-z0-9]{12})_([A-Za-z0-9_-]{43})", re.ASCII)
_ID_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # without l, 1 and 0, which are easily confused
_LIMITED_TO = re.compile(r"(wire|model):[^\s,]{1,200}")
_OWNER = re.compile(r"[\w.@+-]{1,200}")
_NO_SECRET = bytes(32)


class Key(msgspec.Struct, frozen=True):
    """A stored key. Times are seconds since the epoch.

    After a rotation both secrets are valid for a while, so that clients with the old one keep working.
    """

    key_id: str
    owner: str
    name: str = ""
    scopes: tuple[str, ...] = DEFAULT_SCOPES
    secret_hash: bytes = b""
    created_s: float = 0.0
    expires_s: float | None = None
    revoked_s: float | None = None
    old_secret_hash: bytes = b""
    old_expires_s: float | None = None  # when the previous secret becomes invalid
    quota: Quota = NO_LIMITS

    def state(self, now_s: float) -> str:
        """Return active, expired or revoked."""
        if self.revoked_s is not None:
            return "revoked"
        return "expired" if self.expires_s is not None and now_s >= self.expires_s else "active"

    def accepts(self, secret: str, now_s: float) -> bool:
        """Return whether the secret is correct and the key is active. Takes the same time for all wrong secrets."""
        return self.accepts_hash(hash_of(secret), now_s)

    def accepts_hash(self, given: bytes, now_s: float) -> bool:
        """Return the same for the hash of a secret."""
        is_new = hmac.compare_digest(given, self.secret_hash or _NO_SECRET)
        is_old = hmac.compare_digest(given, self.old_secret_hash or _NO_SECRET)
        old_works = self.old_expires_s is not None and now_s < self.old_expires_s
        return (is_new or (is_old and old_works)) and self.state(now_s) == "active"


class NewKey(msgspec.Struct, frozen=True):
    """A key that was just created or rotated, with the only copy of its token."""

    key: Key
    token: str


def hash_of(secret: str) -> bytes:
    """Hash a secret. A fast hash such as SHA-256 is enough, because a secret has 256 random bits."""
    return hashlib.sha256(secret.encode()).digest()


def new_key(
    owner: str,
    *,
    now_s: float,
    name: str = "",
    scopes: tuple[str, ...] = DEFAULT_SCOPES,
    expires_s: float | None = None,
    quota: Quota = NO_LIMITS,
) -> NewKey:
    """Create a key. Raises: ValueError for an invalid owner, name or scope."""
    if "\0" in name:
        raise ValueError("A key's name must not contain NUL characters.")
    key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(12))
    key = Key(key_id, check_owner(owner), name, check_scopes(scopes), created_s=now_s, expires_s=expires_s, quota=quota)
    return _with_secret(key)


def rotated(key: Key, *, now_s: float, grace_s: float) -> NewKey:
    """Return the key with a new secret. The current secret stays valid for `grace_s`."""
    old = msgspec.structs.replace(key, old_secret_hash=key.secret_hash, old_expires_s=now_s + grace_s)
    return _with_secret(old)


def _with_secret(key: Key) -> NewKey:
    secret = secrets.token_urlsafe(32)
    return NewKey(msgspec.structs.replace(key, secret_hash=hash_of(secret)), f"tr_{key.key_id}_{secret}")


def split_token(token: str) -> tuple[str, str] | None:
    """Return the id and the secret of a token; None if it does not have the form of a token."""
    found = _TOKEN.fullmatch(token)
    return (found[1], found[2]) if found else None


def check_owner(owner: str) -> str:
    """Raises: ValueError."""
    if not _OWNER.fullmatch(owner) or owner == ANONYMOUS:
        raise ValueError("An owner's name must have 1 to 200 letters, digits or . _ @ + -, and must not be anonymous.")
    return owner


def check_scopes(scopes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the scopes sorted and without duplicates. Raises: ValueError."""
    for scope in scopes:
        if scope not in ACTIONS and not _LIMITED_TO.fullmatch(scope):
            raise ValueError(f"A scope must be {', '.join(ACTIONS)}, wire:NAME or model:NAME.")
    if not set(scopes) & set(ACTIONS):
        raise ValueError(f"A key needs at least one of the scopes {', '.join(ACTIONS)}.")
    return tuple(sorted(set(scopes)))
