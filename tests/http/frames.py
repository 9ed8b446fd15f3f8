"""A WebSocket client that shows every frame, and can send any frame, including invalid ones."""

from __future__ import annotations

import struct

from tests.http.wire import Wire

__all__ = ["BINARY", "CLOSE", "CONTINUATION", "PING", "PONG", "TEXT", "FrameWire", "frame", "handshake"]

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA


def handshake(**changes: str) -> dict[str, str]:
    """Return the headers of a valid handshake, with these changes; underscores stand for hyphens, and "" leaves one
    out."""
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    return headers | {name.replace("_", "-"): text for name, text in changes.items()}


def frame(opcode: int, payload: bytes = b"", *, is_last: bool = True, is_masked: bool = True) -> bytes:
    """Return a client's frame; its mask has no effect."""
    bit = 0x80 if is_masked else 0
    head = bytes([0x80 * is_last | opcode])
    if len(payload) < 126:
        head += bytes([bit | len(payload)])
    elif len(payload) < 65_536:
        head += struct.pack("!BH", bit | 126, len(payload))
    else:
        head += struct.pack("!BQ", bit | 127, len(payload))
    return head + (bytes(4) if is_masked else b"") + payload


class FrameWire(Wire):
    """One connection, upgraded by `open`."""

    def __enter__(self) -> FrameWire:
        return self

    def open(self, path: str, **headers: str) -> None:
        self.send("GET", path, None, handshake(**headers))
        assert self.head() == 101

    def frame(self) -> tuple[int, bytes]:
        """Return the next frame. Raises: EOFError if the connection ends."""
        opcode, length = self.take(2)
        assert opcode & 0x70 == 0
        if length == 126:
            (length,) = struct.unpack("!H", self.take(2))
        elif length == 127:
            (length,) = struct.unpack("!Q", self.take(8))
        return opcode & 0x0F, self.take(length)

    def closing(self) -> tuple[int, str]:
        """Return code and reason of the close frame, and skip frames before it."""
        while True:
            opcode, payload = self.frame()
            if opcode == CLOSE:
                return int.from_bytes(payload[:2], "big"), payload[2:].decode()
