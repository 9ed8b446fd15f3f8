"""Links that show one conversation or one stream to whoever has them, without a key.

A link has the id of its share and a signature of what the share says, made with the share's own secret. The secrets are
in the database, and each server has all shares in memory, as it has the keys. So every server over the same database
accepts a link, and refuses it within a second after it was revoked. A link ends with the key that made it, too: when
that is revoked or expires, and, if it was made without a key, when the server gets its first key.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import re
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

import msgspec

from tailrace.access.keyring import Keyring

__all__ = ["Share", "ShareKind", "Shares", "new_share", "token_of"]

ShareKind: TypeAlias = Literal["conversation", "stream"]

_TOKEN = re.compile(r"trs_([0-9a-f]{16})_([A-Za-z0-9_-]{43})", re.ASCII)
_SWEEP_S = 60.0
_PURPOSE = b"tailrace share\0"  # so that no other use of the secret can produce this signature


class Share(msgspec.Struct, frozen=True):
    """What a link shows. `target` is the id of the conversation or of the stream. Times are seconds since the epoch."""

    share_id: str
    owner: str
    key_id: str  # that made it; "" if no keys were in use
    kind: ShareKind
    target: str
    secret: bytes
    created_s: float
    expires_s: float
    revoked_s: float | None = None


def new_share(owner: str, key_id: str, kind: ShareKind, target: str, *, now_s: float, expires_s: float) -> Share:
    return Share(secrets.token_hex(8), owner, key_id, kind, target, secrets.token_bytes(32), now_s, expires_s)


def token_of(share: Share) -> str:
    """Return the secret part of the link."""
    said = msgspec.json.encode([share.share_id, share.owner, share.kind, share.target, share.expires_s])
    signature = hmac.digest(share.secret, _PURPOSE + said, hashlib.sha256)
    return f"trs_{share.share_id}_{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


# Compared if the id is unknown, so that a wrong id takes as long as a wrong signature.
_NOBODYS = new_share("nobody", "", "stream", "", now_s=0.0, expires_s=0.0)


class Shares:
    """All shares that have not expired, in memory."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._by_id: dict[str, Share] = {}
        self._readers: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._swept_s = 0.0
        keyring.on_revoked(self._end_of_key)

    def update(self, shares: Iterable[Share], now_s: float, *, is_whole: bool = False) -> None:
        """Add new shares, and end those that were revoked; with `is_whole` also all that are not among them. Called
        after each update of the keyring: readers whose link it has ended are sent away, too."""
        if is_whole:
            shares = list(shares)
            for share_id in self._by_id.keys() - {share.share_id for share in shares}:
                self.end(share_id)
        for share in shares:
            if share.revoked_s is None and share.expires_s > now_s:
                self._by_id[share.share_id] = share
            else:
                self.end(share.share_id)
        if abs(now_s - self._swept_s) >= _SWEEP_S:
            self._swept_s = now_s
            for share in [one for one in self._by_id.values() if one.expires_s <= now_s]:
                self.end(share.share_id)
        for share_id in list(self._readers):
            read = self._by_id.get(share_id)
            if read is None or not self.is_valid(read, now_s):
                self.end(share_id)

    def end(self, share_id: str) -> None:
        """Forget a share, and send its readers away."""
        self._by_id.pop(share_id, None)
        for ended in self._readers.get(share_id, ()):
            ended.set()

    def find(self, token: str, now_s: float) -> Share | None:
        """Return the share of a link; None if there is none, or it is not valid now."""
        match = _TOKEN.fullmatch(token)
        share = self._by_id.get(match[1], _NOBODYS) if match else _NOBODYS
        is_signed = hmac.compare_digest(token.encode(), token_of(share).encode())
        return share if is_signed and self.is_valid(share, now_s) else None

    def is_valid(self, share: Share, now_s: float) -> bool:
        return share.expires_s > now_s and self._is_held(share)

    def _is_held(self, share: Share) -> bool:
        """Return whether neither the share nor the key that made it has ended."""
        if share.share_id not in self._by_id:
            return False
        maker = self._keyring.principal_of(share.key_id)
        return maker is not None and maker.owner == share.owner

    def ends_s(self, share: Share) -> float:
        """Return when the link or the key that made it expires."""
        key = self._keyring.keys.get(share.key_id)
        ends = [share.expires_s, *([key.expires_s] if key is not None and key.expires_s is not None else [])]
        return min(ends)

    @property
    def num_readers(self) -> int:
        return sum(map(len, self._readers.values()))

    def num_readers_of(self, share: Share) -> int:
        return len(self._readers.get(share.share_id, ()))

    @contextlib.contextmanager
    def reading(self, share: Share) -> Iterator[asyncio.Event]:
        """Count a reader of a share. The event is set when the share is revoked, with its key or alone."""
        ended = asyncio.Event()
        if not self._is_held(share):  # it was valid when it was looked up
            ended.set()
        self._readers[share.share_id].add(ended)
        try:
            yield ended
        finally:
            self._readers[share.share_id].discard(ended)
            if not self._readers[share.share_id]:
                del self._readers[share.share_id]

    def _end_of_key(self, key_id: str) -> None:
        for share in [one for one in self._by_id.values() if one.key_id == key_id]:
            self.end(share.share_id)
