"""Tickets: the right to follow one stream for a short time, for clients that cannot send a key.

A browser's EventSource and WebSocket cannot send an Authorization header, and a key in a URL would end up in logs. So a
page requests a ticket with its key, and puts the ticket into the URL.

A ticket is signed with the hash of its key's secret, which every server over the same database has. So all of them
accept it, also after a restart, and no server stores it. It ends with the secret: at a rotation without grace, and when
the key is revoked.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping

import msgspec

from tailrace.access.keys import Key

__all__ = ["LIFETIME_S", "StreamTicket", "new_ticket", "read_ticket"]

LIFETIME_S = 300.0  # an EventSource sends the same ticket when it reconnects
_MAC_BYTES = 32
_PURPOSE = b"tailrace ticket\0"  # so that no other use of the hash can produce a ticket's signature


class StreamTicket(msgspec.Struct, frozen=True, array_like=True):
    """The content of a ticket."""

    key_id: str
    stream_id: str
    expires_s: float  # since the epoch


def new_ticket(key: Key, stream_id: str, now_s: float) -> str:
    """Return a ticket of a key for a stream."""
    expires_s = now_s + LIFETIME_S
    payload = msgspec.json.encode(StreamTicket(key.key_id, stream_id, expires_s))
    # After a rotation, other servers know the old secret already, and the new one within a second.
    old_works = key.old_expires_s is not None and expires_s < key.old_expires_s
    signer = key.old_secret_hash if old_works else key.secret_hash
    return base64.urlsafe_b64encode(_mac(signer, payload) + payload).decode().rstrip("=")


def read_ticket(text: str, keys: Mapping[str, Key], now_s: float) -> StreamTicket | None:
    """Return the content of a ticket; None if it was not made with a valid secret of one of these keys, by id, or has
    expired."""
    try:
        signed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        mac, payload = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        ticket = msgspec.json.decode(payload, type=StreamTicket)
    except ValueError:
        return None
    key = keys.get(ticket.key_id)
    if key is None or now_s >= ticket.expires_s:
        return None
    signers = [secret_hash for secret_hash in (key.secret_hash, key.old_secret_hash) if secret_hash]
    signer = next((one for one in signers if hmac.compare_digest(mac, _mac(one, payload))), None)
    return ticket if signer is not None and key.accepts_hash(signer, now_s) else None


def _mac(secret_hash: bytes, payload: bytes) -> bytes:
    return hmac.digest(secret_hash, _PURPOSE + payload, hashlib.sha256)
