"""Messages on a byte stream: each with its length in front."""

from __future__ import annotations

import struct

__all__ = ["MAX_FRAME_BYTES", "FrameBuffer", "framed"]

MAX_FRAME_BYTES = 64 * 2**20

_LENGTH = struct.Struct("<I")


def framed(body: bytes) -> bytes:
    """A message with its length in front, ready for the socket."""
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Cuts a byte stream back into message bodies."""

    __slots__ = ("_num_wanted", "_rest")

    def __init__(self) -> None:
        self._rest = bytearray()  # of a message that is not complete
        self._num_wanted = 0  # bytes of it, before it is worth looking at again

    def feed(self, chunk: bytes) -> list[bytes]:
        """The bodies completed by `chunk`, in order.

        Raises: ValueError if a length is beyond reason, which means that the peer talks something else.
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
