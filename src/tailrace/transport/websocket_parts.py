"""Parts of the WebSocket protocol: assembling messages, encoding frames, and turns between writers."""

from __future__ import annotations

import asyncio
import codecs
import io
import struct
from collections import deque
from collections.abc import Callable

from starlette.types import Message
from websockets.frames import Frame, Opcode

__all__ = ["LARGER", "SEND_MANY", "Deadline", "LargeMessages", "MessageAssembler", "WriteTurns", "frames_of"]

# An ASGI extension, and the type of its message: `frames` is a sequence of UTF-8 texts, which are sent in one write.
SEND_MANY = "tailrace.websocket.send"

# An ASGI extension: a function that gets the size of the largest message from now on, and a `LargeMessages`.
LARGER = "tailrace.websocket.larger"
_STEP_BYTES = 65_536

_Utf8 = codecs.getincrementaldecoder("utf-8")
_TEXT, _BINARY = 0x81, 0x82  # first byte of a frame that is a whole message


class Deadline:
    """A timeout that calls a function, unless it is stopped before."""

    def __init__(self, delay_s: float, call: Callable[[], None]) -> None:
        self._delay_s = delay_s
        self._call = call
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timeout. Does nothing if it runs already."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._call)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class LargeMessages:
    """The memory of the messages of one connection that are larger than usual: reserved while they arrive, until the
    application has them. `take` is called with the bytes to reserve, and those that are reserved for the message
    already; `give_back` with bytes."""

    def __init__(self, take: Callable[[int, int], None], give_back: Callable[[int], None]) -> None:
        self._take = take
        self._give_back = give_back
        self._num_bytes = 0  # of the message that arrives
        self._num_reserved = 0  # for it
        self._num_waiting = 0  # for messages that wait for the application

    def arrived(self, num_bytes: int, usual_bytes: int) -> None:
        """More of a message has arrived. Raises: AdmissionError if there is no memory for it now."""
        self._num_bytes += num_bytes
        if self._num_bytes > max(usual_bytes, self._num_reserved):
            wanted_bytes = self._num_bytes + _STEP_BYTES - self._num_reserved
            self._take(wanted_bytes, self._num_reserved)
            self._num_reserved += wanted_bytes

    def end(self) -> None:
        """The message is complete, and waits for the application."""
        self._num_waiting += self._num_reserved
        self._num_bytes = self._num_reserved = 0

    def release(self) -> None:
        """The application has the messages, or nobody will have them."""
        if self._num_waiting:
            self._give_back(self._num_waiting)
            self._num_waiting = 0


class MessageAssembler:
    """Joins fragments as they arrive, so that a million fragments take no more memory than their text."""

    def __init__(self) -> None:
        self._decoder: codecs.IncrementalDecoder | None = None  # of the current message, if it is text
        self._text = io.StringIO()
        self._binary = bytearray()

    def add(self, frame: Frame) -> Message | None:
        """Add a frame. Returns the ASGI message if the frame completes it. Raises: UnicodeDecodeError."""
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
    """Lets several tasks write to one socket in turns, one frame each, in order of arrival, while the transport is
    full."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.is_full = False  # the transport has paused writing

    def __len__(self) -> int:
        """Return how many tasks wait."""
        return len(self._waiting)

    async def wait(self) -> None:
        """Return when it is this task's turn. Call `next` after writing.

        Cancellation: passes the turn on to the next task.
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
        """Wake the next task, if the transport has room."""
        while self._waiting and not self.is_full:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def open(self) -> None:
        """Wake all tasks, because the connection is closed."""
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)
        self._waiting.clear()


def frames_of(message: Message) -> bytes:
    """Encode an ASGI message as frames."""
    if message["type"] == SEND_MANY:
        return b"".join([_frame(_TEXT, frame) for frame in message["frames"]])
    text = message.get("text")
    return _frame(_BINARY, message["bytes"]) if text is None else _frame(_TEXT, text.encode())


def _frame(kind: int, payload: bytes) -> bytes:
    """Encode a server's frame, four times as fast as the library, which also does checks and masking."""
    length = len(payload)
    if length < 126:
        return bytes((kind, length)) + payload
    if length < 65_536:
        return struct.pack("!BBH", kind, 126, length) + payload
    return struct.pack("!BBQ", kind, 127, length) + payload
