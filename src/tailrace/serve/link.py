"""Many conversations over one socket: what crosses between the front and a process of user code.

Either end opens channels; on each, both ends send messages until one of them closes it. A sender waits while the other
end is behind by more than a window, so that a slow reader slows down its own producer and nobody else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, cast

import msgspec

from tailrace.frames import MAX_FRAME_BYTES, FrameBuffer, framed

__all__ = ["MAX_MESSAGE_BYTES", "Channel", "ChannelClosed", "Link", "LinkLost"]

_WINDOW_BYTES = 256 * 2**10
_GRANT_BYTES = 64 * 2**10
_MESSAGE_BYTES = 64  # what a message costs besides its body, so that empty ones do not pile up without bound
_MAX_CHANNELS = 100_000
_TURNS_TO_WRITE = 2  # of the event loop: one in which the link writes, and one in which uvloop sends what was written
MAX_MESSAGE_BYTES = MAX_FRAME_BYTES - 256  # less what stands around a message


class _Open(msgspec.Struct, tag=0, array_like=True, gc=False):
    channel: int
    kind: str
    head: bytes


class _Item(msgspec.Struct, tag=1, array_like=True, gc=False):
    channel: int
    body: bytes


class _Grant(msgspec.Struct, tag=2, array_like=True, gc=False):
    channel: int
    num_bytes: int


class _Close(msgspec.Struct, tag=3, array_like=True, gc=False):
    """From the end where the work is, also: the work is over. It says so even where the other end has closed before.

    `failure` is None where all went well; what it holds otherwise is between those who talk.
    """

    channel: int
    failure: bytes | None = None


class _Begun(msgspec.Struct, tag=4, array_like=True, gc=False):
    """The work behind a channel has begun, or is about to."""

    channel: int


_Message: TypeAlias = _Open | _Item | _Grant | _Close | _Begun

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Message).decode


class ChannelClosed(ConnectionError):  # said of a state, as asyncio's own
    """The other end has closed the channel. `failure` is what it gave as a reason."""

    def __init__(self, failure: bytes | None = None) -> None:
        super().__init__("the other end has closed this channel")
        self.failure = failure


class LinkLost(ChannelClosed):
    """The other process is gone."""


class Channel:
    """One conversation. Used on the link's event loop only."""

    __slots__ = (
        "_arrived", "_consumed", "_end", "_is_ours", "_is_over", "_link", "_number", "_on_over", "_room", "_sendable",
        "_waiter", "has_begun", "on_close",
    )  # fmt: skip

    def __init__(self, link: Link, number: int, *, is_ours: bool) -> None:
        self._link = link
        self._is_ours = is_ours  # opened at this end, so that the work is at the other
        self._number = number
        self._arrived: deque[bytes] = deque()
        self._consumed = 0  # bytes that the other end has not been told of
        self._room = _WINDOW_BYTES  # what may still be sent
        self._end: ChannelClosed | None = None
        self._waiter: asyncio.Future[None] | None = None  # of `receive`
        self._sendable: asyncio.Future[None] | None = None  # of `send`
        self.on_close: Callable[[], object] | None = None  # called when the other end closes
        self.has_begun = False  # the work at the other end; until it has, it may as well be done elsewhere
        self._is_over = False  # at the other end
        self._on_over: Callable[[], None] | None = None

    @property
    def is_closed(self) -> bool:
        return self._end is not None

    async def send(self, body: bytes) -> None:
        """Send a message, after waiting for room.

        Raises: ChannelClosed if nobody would hear it, ValueError if it is too long.

        Cancellation: nothing was sent.
        """
        while self._room <= 0 and self._end is None:
            if self._sendable is None:
                self._sendable = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._sendable)
        self.post(body)

    def post(self, body: bytes) -> None:
        """Send without waiting: for messages of which there are few. Raises: as `send`."""
        if self._end is not None:
            raise self._end
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(f"{len(body)} bytes are more than cross between processes at once ({MAX_MESSAGE_BYTES}).")
        self._room -= len(body) + _MESSAGE_BYTES
        self._link.write(_Item(self._number, body))

    async def receive(self) -> bytes:
        """The next message. Raises: ChannelClosed when there is none and none will come.

        One may wait at a time. Cancellation: no message is lost.
        """
        while not self._arrived:
            if self._end is not None:
                raise self._end
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        body = self._arrived.popleft()
        self._consumed += len(body) + _MESSAGE_BYTES
        if self._consumed >= _GRANT_BYTES and self._end is None:
            self._link.write(_Grant(self._number, self._consumed))
            self._consumed = 0
        return body

    def close(self, failure: bytes | None = None) -> None:
        """Say that nothing more comes, and that nothing more is heard. Does nothing on a closed channel."""
        if self._end is None:
            self._link.write(_Close(self._number, failure))
            self._leave(ChannelClosed())
            if self._is_ours and not self._link.is_lost:
                self._link.working[self._number] = self

    async def begin(self) -> None:
        """Tell the other end that the work behind this channel begins, and return when that is on its way: work that
        ends this process or blocks it cannot hold it back."""
        self._link.write(_Begun(self._number))
        for _ in range(_TURNS_TO_WRITE):
            await asyncio.sleep(0)

    def serve(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do the work of a channel that the other end has opened, and say when it is over. When that end closes the
        channel, the work is cancelled, unless `on_close` is set to something else."""
        task = asyncio.get_running_loop().create_task(work)
        self._link.tasks.add(task)
        task.add_done_callback(self._settle)  # also where it is cancelled before its first step
        self.on_close = task.cancel
        return task

    def _settle(self, task: asyncio.Task[None]) -> None:
        self._link.tasks.discard(task)
        if self._is_over:  # the other end has closed
            self._link.write(_Close(self._number))
        self.close()

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call this when the other end's work for this channel is over, which may be after we have closed it."""
        if self._is_over or self._link.is_lost:
            callback()
        else:
            self._on_over = callback

    def over(self) -> None:
        """The other end has said so, or is gone."""
        self._is_over = True
        callback, self._on_over = self._on_over, None
        if callback is not None:
            callback()

    def _take(self, message: _Item | _Grant | _Close | _Begun) -> None:
        if isinstance(message, _Begun):
            self.has_begun = True
        elif isinstance(message, _Item):
            self._arrived.append(message.body)
            _wake(self._waiter)
        elif isinstance(message, _Grant):
            self._room += message.num_bytes
            if self._room > 0:
                _wake(self._sendable)
                self._sendable = None
        else:
            self._lost(ChannelClosed(message.failure))

    def _lost(self, end: ChannelClosed) -> None:
        self.over()
        if self._end is None:
            self._leave(end)
            if self.on_close is not None:
                self.on_close()

    def _leave(self, end: ChannelClosed) -> None:
        self._end = end
        self._link.channels.pop(self._number, None)
        _wake(self._waiter)
        _wake(self._sendable)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


Opened: TypeAlias = Callable[[Channel, str, bytes], None]


class Link(asyncio.Protocol):
    """One end of the socket. `opened` is called with each channel that the other end opens, its kind and its head;
    `lost` once, when the other process is gone."""

    def __init__(self, opened: Opened, lost: Callable[[], None], *, is_front: bool) -> None:
        self._opened = opened
        self._lost = lost
        self._next = 0 if is_front else 1  # the two ends number apart
        self.channels: dict[int, Channel] = {}  # that neither end has closed
        self.working: dict[int, Channel] = {}  # that we have closed, with work at the other end that may go on
        self.tasks: set[asyncio.Task[None]] = set()  # the work of channels that the other end has opened
        self._buffer = FrameBuffer()
        self._unwritten: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self.is_lost = False

    @property
    def num_channels(self) -> int:
        """Conversations that neither end has closed."""
        return len(self.channels)

    def open(self, kind: str, head: bytes = b"") -> Channel:
        """A new channel. On a link that is lost, one that is closed. Raises: ValueError if the head is too long."""
        if len(head) > MAX_MESSAGE_BYTES:
            raise ValueError(f"{len(head)} bytes are more than cross between processes at once ({MAX_MESSAGE_BYTES}).")
        self._next += 2
        channel = Channel(self, self._next, is_ours=True)
        if self.is_lost:
            channel._lost(LinkLost())
            return channel
        self.channels[self._next] = channel
        self.write(_Open(self._next, kind, head))
        return channel

    def write(self, message: _Message) -> None:
        """All that is written in one turn of the loop goes out together."""
        if self.is_lost:
            return
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unwritten.append(framed(_encode(message)))

    def _flush(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        if self._transport is not None and not self.is_lost:
            self._transport.write(b"".join(unwritten))

    def abort(self) -> None:
        """Let go of the socket at once."""
        if self._transport is not None:
            self._transport.abort()
        self._leave()

    def close(self) -> None:
        """Let go of the socket when all is written."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._buffer.feed(data):
                self._take(_decode(body))
        except (msgspec.DecodeError, ValueError):
            self.abort()  # the other end talks something else

    def _take(self, message: _Message) -> None:
        if isinstance(message, _Open):
            if len(self.channels) >= _MAX_CHANNELS:
                raise ValueError("too many channels")
            channel = self.channels[message.channel] = Channel(self, message.channel, is_ours=False)
            self._opened(channel, message.kind, message.head)
            return
        if isinstance(message, _Close):
            working = self.working.pop(message.channel, None)
            if working is not None:
                working.over()
        known = self.channels.get(message.channel)
        if known is not None:  # else we have closed it, and this was under way
            known._take(message)

    def _leave(self) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        for channel in list(self.channels.values()):
            channel._lost(LinkLost())
        working, self.working = self.working, {}
        for channel in working.values():
            channel.over()
        self._lost()
