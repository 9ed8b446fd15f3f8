"""Tickets: the right to follow one stream for a short time, for clients that cannot send a key.

A browser's EventSource and WebSocket cannot send an Authorization header, and a key in a URL would end up in logs. So a
page requests a ticket with its key, and puts the ticket into the URL.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time

import msgspec

__all__ = ["LIFETIME_S", "StreamTicket", "Tickets"]

LIFETIME_S = 300.0  # an EventSource sends the same ticket when it reconnects
_MAC_BYTES = 32


class StreamTicket(msgspec.Struct, frozen=True, array_like=True):
    """The content of a ticket."""

    key_id: str
    stream_id: str
    expires_s: float  # since the epoch


class Tickets:
    """Issues and checks tickets. They are signed and not stored. Each server process has its own secret."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def issue(self, key_id: str, stream_id: str) -> str:
        payload = msgspec.json.encode(StreamTicket(key_id, stream_id, time.time() + LIFETIME_S))
        return base64.urlsafe_b64encode(self._mac(payload) + payload).decode().rstrip("=")

    def read(self, text: str) -> StreamTicket | None:
        """Return the content of a ticket; None if it was not issued by this process, or has expired."""
        try:
            signed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except ValueError:
            return None
        mac, payload = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(payload)):
            return None
        ticket = msgspec.json.decode(payload, type=StreamTicket)
        return ticket if time.time() < ticket.expires_s else None

    def _mac(self, payload: bytes) -> bytes:
        return hmac.digest(self._secret, payload, hashlib.sha256)
