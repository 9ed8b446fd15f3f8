"""What flows between a WebSocket's transport and its application: messages one way, turns and frames the other. And
the core of the `websockets` library that reads frames."""

from __future__ import annotations

import asyncio
import codecs
import io
import logging
import struct
from collections import deque
from collections.abc import Callable, Generator

from starlette.types import Message
from websockets.frames import Frame, Opcode
from websockets.server import ServerProtocol

__all__ = ["SEND_MANY", "Core", "Deadline", "MessageAssembler", "WriteTurns", "frames_of"]

# An extension of ASGI, and the type of its message: `frames`, a sequence of texts in UTF-8, to be sent in one write.
SEND_MANY = "tailrace.websocket.send"

_Utf8 = codecs.getincrementaldecoder("utf-8")
_TEXT, _BINARY = 0x81, 0x82  # first bytes of frames that are whole messages


class Core(ServerProtocol):
    """Reads frames, and knows where in a message it is."""

    def __init__(self, *, max_size: int | None, logger: logging.Logger) -> None:
        super().__init__(max_size=max_size, logger=logger)
        self.debug = False  # else it logs what is in the frames
        self._is_amid_frame = False
        at_eof = self.reader.at_eof

        def wait_for_frame() -> Generator[None, None, bool]:  # the parser asks this between two frames
            self._is_amid_frame = False
            is_over = yield from at_eof()
            self._is_amid_frame = True
            return is_over

        self.reader.at_eof = wait_for_frame  # type: ignore[method-assign]  # the parser has no other place for it

    @property
    def is_amid_message(self) -> bool:
        """A part of a message or of a frame has arrived, and the rest has not."""
        return self._is_amid_frame or self.current_size is not None

    def recv_frame(self, frame: Frame) -> None:
        """A close frame between the fragments of a message is answered like any other (Autobahn 7.1.5)."""
        if frame.opcode is Opcode.CLOSE:
            self.current_size = None
        super().recv_frame(frame)


class Deadline:
    """Calls something, unless what it waits for comes in time."""

    def __init__(self, delay_s: float, call: Callable[[], None]) -> None:
        self._delay_s = delay_s
        self._call = call
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Does nothing while it runs."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._call)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class MessageAssembler:
    """Puts fragments together as they come, so that a million of them take no more memory than their text."""

    def __init__(self) -> None:
        self._decoder: codecs.IncrementalDecoder | None = None  # of the message that is arriving, if it is text
        self._text = io.StringIO()
        self._binary = bytearray()

    def add(self, frame: Frame) -> Message | None:
        """The message that is complete with this frame, for the application. Raises: UnicodeDecodeError."""
        if frame.opcode is Opcode.TEXT:
            self._decoder = _Utf8()
        if self._decoder is None:
            self._binary += frame.data
            if not frame.fin:
                return None
            binary, self._binary = bytes(self._binary), bytearray()
            return {"type": "websocket.receive", "bytes": binary}
        self._text.write(self._decoder.decode(bytes(frame.data), frame.fin))
        if not frame.fin:
            return None
        text, self._text, self._decoder = self._text.getvalue(), io.StringIO(), None
        return {"type": "websocket.receive", "text": text}


class WriteTurns:
    """Who may write next, while the transport has no room: first come, first served, one frame each."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.is_full = False  # the transport wants no more

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def wait(self) -> None:
        """Return when it is one's turn. Call `next` when the turn has been used.

        Cancellation: the turn goes to the next.
        """
        if not self.is_full and not self._waiting:
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.next()
            raise

    def next(self) -> None:
        """Wake the next writer, if there is room."""
        while self._waiting and not self.is_full:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def open(self) -> None:
        """Wake everybody: nothing can be written any more, and they should hear of it."""
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)
        self._waiting.clear()


def frames_of(message: Message) -> bytes:
    """What an application sends, as it stands on the wire."""
    if message["type"] == SEND_MANY:
        return b"".join([_frame(_TEXT, frame) for frame in message["frames"]])
    text = message.get("text")
    return _frame(_BINARY, message["bytes"]) if text is None else _frame(_TEXT, text.encode())


def _frame(kind: int, payload: bytes) -> bytes:
    """A server's frame. The core's way, with its checks and its masks, takes four times as long."""
    length = len(payload)
    if length < 126:
        return bytes((kind, length)) + payload
    if length < 65_536:
        return struct.pack("!BBH", kind, 126, length) + payload
    return struct.pack("!BBQ", kind, 127, length) + payload
