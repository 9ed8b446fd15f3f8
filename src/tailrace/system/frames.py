"""Length-prefixed messages on a byte stream."""

from __future__ import annotations

import struct

__all__ = ["MAX_FRAME_BYTES", "FrameBuffer", "framed"]

MAX_FRAME_BYTES = 64 * 2**20

_LENGTH = struct.Struct("<I")


def framed(body: bytes) -> bytes:
    """Return a message with its length prefix."""
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Splits a byte stream into message bodies."""

    __slots__ = ("_num_wanted", "_rest")

    def __init__(self) -> None:
        self._rest = bytearray()  # an incomplete message
        self._num_wanted = 0  # size of `_rest` at which parsing can continue

    @property
    def is_partial(self) -> bool:
        """Whether it has the beginning of a message."""
        return bool(self._rest)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the bodies that `chunk` completes, in order.

        Raises: ValueError if a length is larger than MAX_FRAME_BYTES: the peer speaks another protocol.
        """
        stream = chunk
        if self._rest:
            self._rest += chunk
            if len(self._rest) < self._num_wanted:
                return []
            stream = bytes(self._rest)
            self._rest.clear()
        bodies = []
        start, end = 0, len(stream)
        wanted = 4
        while end - start >= 4:
            (length,) = _LENGTH.unpack_from(stream, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            stop = start + 4 + length
            if stop > end:
                wanted = 4 + length
                break
            bodies.append(stream[start + 4 : stop])
            start = stop
        self._rest += stream[start:]
        self._num_wanted = wanted
        return bodies
