"""The sans-I/O core of `websockets`, which parses frames and keeps the state of a connection."""

from __future__ import annotations

import logging
from collections.abc import Generator

from websockets.frames import Close, Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol

__all__ = ["Core"]


class Core(ServerProtocol):
    """Parses frames, and knows whether a message is incomplete."""

    def __init__(self, *, max_size: int | None, logger: logging.Logger) -> None:
        super().__init__(max_size=max_size, logger=logger)
        self.debug = False  # otherwise it logs the content of frames
        self._is_amid_frame = False
        at_eof = self.reader.at_eof

        def wait_for_frame() -> Generator[None, None, bool]:  # the parser calls this between two frames
            self._is_amid_frame = False
            is_over = yield from at_eof()
            self._is_amid_frame = True
            return is_over

        self.reader.at_eof = wait_for_frame  # type: ignore[method-assign]  # the parser has no other hook

    @property
    def is_amid_fragments(self) -> bool:
        """Return whether the last frame left its message incomplete."""
        return self.current_size is not None

    @property
    def is_amid_message(self) -> bool:
        """Return whether only a part of a message or of a frame has arrived."""
        return self._is_amid_frame or self.is_amid_fragments

    @property
    def has_failed(self) -> bool:
        """Return whether the client has sent what is no frame, or none that is allowed here."""
        return self.parser_exc is not None

    @property
    def received_close(self) -> Close | None:
        return self.close_rcvd

    @property
    def sent_close(self) -> Close | None:
        return self.close_sent

    def allow(self, most_bytes: int) -> None:
        """Set the size of the largest message, from the next frame on."""
        self.max_message_size = most_bytes

    def set_closed(self) -> None:
        """The connection is lost."""
        self.state = State.CLOSED

    def recv_frame(self, frame: Frame) -> None:
        """Accept a close frame between the fragments of a message (Autobahn 7.1.5)."""
        if frame.opcode is Opcode.CLOSE:
            self.current_size = None
        super().recv_frame(frame)
