"""Tickets: leave to follow one stream for a short while, for clients that cannot send a key.

A browser's EventSource and WebSocket send no header of ours, and a key in a URL ends up in logs. So a page asks for a
ticket with its key, and puts that into the URL.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time

import msgspec

__all__ = ["LIFETIME_S", "StreamTicket", "Tickets"]

LIFETIME_S = 300.0  # an EventSource that reconnects uses the same one again
_MAC_BYTES = 32


class StreamTicket(msgspec.Struct, frozen=True, array_like=True):
    """What a ticket says."""

    key_id: str
    stream_id: str
    expires_s: float  # since the epoch


class Tickets:
    """Issues and reads tickets. They are signed and not kept; a server that starts has another secret."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def issue(self, key_id: str, stream_id: str) -> str:
        said = msgspec.json.encode(StreamTicket(key_id, stream_id, time.time() + LIFETIME_S))
        return base64.urlsafe_b64encode(self._mac(said) + said).decode().rstrip("=")

    def read(self, text: str) -> StreamTicket | None:
        """None for what was not issued here, or has expired."""
        try:
            signed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except ValueError:
            return None
        mac, said = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(said)):
            return None
        ticket = msgspec.json.decode(said, type=StreamTicket)
        return ticket if time.time() < ticket.expires_s else None

    def _mac(self, said: bytes) -> bytes:
        return hmac.digest(self._secret, said, hashlib.sha256)
