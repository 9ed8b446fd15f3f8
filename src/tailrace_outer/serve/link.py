"""Multiplexes many channels over one socket between the front and a process of user code.

Either end opens channels. On a channel, both ends send messages until one of them closes it. Each channel has its own
flow-control window, so that a slow reader slows down only its own sender.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, cast

import msgspec

from tailrace.system.frames import MAX_FRAME_BYTES, FrameBuffer, framed

__all__ = ["MAX_MESSAGE_BYTES", "Channel", "ChannelClosed", "Link", "LinkLost"]

_WINDOW_BYTES = 256 * 2**10
_GRANT_BYTES = 64 * 2**10
_OVERHEAD_BYTES = 64  # counted for each message, so that empty messages are bounded too
_MAX_CHANNELS = 100_000
MAX_MESSAGE_BYTES = MAX_FRAME_BYTES - 256  # less the envelope of a message


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
    """Closes a channel. The end that does the channel's work sends it when the work is done, even if the other end has
    closed before.

    `failure` is None after success. Its content is defined by the channel's kind.
    """

    channel: int
    failure: bytes | None = None


class _Begun(msgspec.Struct, tag=4, array_like=True, gc=False):
    """The work of a channel begins now."""

    channel: int


_Message: TypeAlias = _Open | _Item | _Grant | _Close | _Begun

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Message).decode


class ChannelClosed(ConnectionError):
    """The other end has closed the channel. `failure` is its reason, if any."""

    def __init__(self, failure: bytes | None = None) -> None:
        super().__init__("the other end has closed this channel")
        self.failure = failure


class LinkLost(ChannelClosed):
    """The other process has closed the socket or died."""


class Channel:
    """One channel. Used on the link's event loop only."""

    __slots__ = (
        "_consumed",
        "_credit_bytes",
        "_end",
        "_is_ours",
        "_is_over",
        "_link",
        "_number",
        "_on_over",
        "_received",
        "_sendable",
        "_waiter",
        "has_begun",
        "on_close",
    )  # fmt: skip

    def __init__(self, link: Link, number: int, *, is_ours: bool) -> None:
        self._link = link
        self._is_ours = is_ours  # opened at this end: the other end does the work
        self._number = number
        self._received: deque[bytes] = deque()
        self._consumed = 0  # bytes not yet granted back to the other end
        self._credit_bytes = _WINDOW_BYTES  # that may still be sent
        self._end: ChannelClosed | None = None
        self._waiter: asyncio.Future[None] | None = None  # of `receive`
        self._sendable: asyncio.Future[None] | None = None  # of `send`
        self.on_close: Callable[[], object] | None = None  # called when the other end closes
        self.has_begun = False  # the work at the other end; before that, it can be retried elsewhere
        self._is_over = False  # the other end's work is done
        self._on_over: Callable[[], None] | None = None

    @property
    def is_closed(self) -> bool:
        return self._end is not None

    async def send(self, body: bytes) -> None:
        """Wait for room in the window, then send a message.

        Raises: ChannelClosed, ValueError if the message is too long.

        Cancellation: nothing was sent.
        """
        while self._credit_bytes <= 0 and self._end is None:
            if self._sendable is None:
                self._sendable = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._sendable)
        self.post(body)

    def post(self, body: bytes) -> None:
        """Send without waiting for room, for rare messages. Raises: as `send`."""
        if self._end is not None:
            raise self._end
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"A message of {len(body)} bytes is too long: the limit between processes is {MAX_MESSAGE_BYTES}."
            )
        self._credit_bytes -= len(body) + _OVERHEAD_BYTES
        self._link.write(_Item(self._number, body))

    async def receive(self) -> bytes:
        """Return the next message. Raises: ChannelClosed after the last one.

        Only one caller may wait at a time. Cancellation: no message is lost.
        """
        while not self._received:
            if self._end is not None:
                raise self._end
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        body = self._received.popleft()
        self._consumed += len(body) + _OVERHEAD_BYTES
        if self._consumed >= _GRANT_BYTES and self._end is None:
            self._link.write(_Grant(self._number, self._consumed))
            self._consumed = 0
        return body

    def close(self, failure: bytes | None = None) -> None:
        """Close the channel in both directions. Does nothing on a closed channel."""
        if self._end is None:
            self._link.write(_Close(self._number, failure))
            self._mark_closed(ChannelClosed())
            if self._is_ours and not self._link.is_lost:
                self._link.working[self._number] = self

    async def begin(self) -> None:
        """Tell the other end that the channel's work begins. Returns when the message is sent, so that work which
        blocks or kills this process cannot delay it."""
        self._link.write(_Begun(self._number))
        await self._link.sent()

    def serve(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run the work of a channel that the other end has opened, and report its end. If the other end closes the
        channel, the work is cancelled; set `on_close` afterwards to change that."""
        task = asyncio.get_running_loop().create_task(work)
        self._link.tasks.add(task)
        task.add_done_callback(self._on_work_done)  # also if it is cancelled before its first step
        self.on_close = task.cancel
        return task

    def _on_work_done(self, task: asyncio.Task[None]) -> None:
        self._link.tasks.discard(task)
        if self._is_over:  # the other end has closed
            self._link.write(_Close(self._number))
        self.close()

    def when_over(self, callback: Callable[[], None]) -> None:
        """Register a callback for the end of the other end's work, which may come after this end has closed the
        channel."""
        if self._is_over or self._link.is_lost:
            callback()
        else:
            self._on_over = callback

    def over(self) -> None:
        """Handle the end of the other end's work, or the loss of the link."""
        self._is_over = True
        callback, self._on_over = self._on_over, None
        if callback is not None:
            callback()

    def _on_message(self, message: _Item | _Grant | _Close | _Begun) -> None:
        if isinstance(message, _Begun):
            self.has_begun = True
        elif isinstance(message, _Item):
            self._received.append(message.body)
            _wake(self._waiter)
        elif isinstance(message, _Grant):
            self._credit_bytes += message.num_bytes
            if self._credit_bytes > 0:
                _wake(self._sendable)
                self._sendable = None
        else:
            self._on_lost(ChannelClosed(message.failure))

    def _on_lost(self, end: ChannelClosed) -> None:
        self.over()
        if self._end is None:
            self._mark_closed(end)
            if self.on_close is not None:
                self.on_close()

    def _mark_closed(self, end: ChannelClosed) -> None:
        self._end = end
        self._link.channels.pop(self._number, None)
        _wake(self._waiter)
        _wake(self._sendable)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


OnChannel: TypeAlias = Callable[[Channel, str, bytes], None]


class Link(asyncio.Protocol):
    """One end of the socket. `on_channel` is called with each channel that the other end opens, its kind and its head.
    `on_lost` is called once, when the connection is lost."""

    def __init__(self, on_channel: OnChannel, on_lost: Callable[[], None], *, is_front: bool) -> None:
        self._on_channel = on_channel
        self._on_lost = on_lost
        self._next = 0 if is_front else 1  # the front uses even numbers, the other end odd ones
        self.channels: dict[int, Channel] = {}  # open at both ends
        self.working: dict[int, Channel] = {}  # closed at this end, while the other end's work goes on
        self.tasks: set[asyncio.Task[None]] = set()  # the work of channels that the other end has opened
        self._buffer = FrameBuffer()
        self._unwritten: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._has_sent = asyncio.Event()  # the kernel has all bytes that were written
        self._has_sent.set()
        self.is_lost = False

    @property
    def num_channels(self) -> int:
        """Number of channels that are open at both ends."""
        return len(self.channels)

    def open(self, kind: str, head: bytes = b"") -> Channel:
        """Open a channel. On a lost link, the channel is already closed. Raises: ValueError if the head is too long."""
        if len(head) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"A message of {len(head)} bytes is too long: the limit between processes is {MAX_MESSAGE_BYTES}."
            )
        self._next += 2
        channel = Channel(self, self._next, is_ours=True)
        if self.is_lost:
            channel._on_lost(LinkLost())
            return channel
        self.channels[self._next] = channel
        self.write(_Open(self._next, kind, head))
        return channel

    def write(self, message: _Message) -> None:
        """Queue a message. All messages of one turn of the event loop are flushed together."""
        if self.is_lost:
            return
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unwritten.append(framed(_encode(message)))

    def _flush(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        if unwritten and self._transport is not None and not self.is_lost:
            self._transport.write(b"".join(unwritten))

    async def sent(self) -> None:
        """Send the queued messages. Returns when the kernel has them, or the link is lost."""
        self._flush()
        await self._has_sent.wait()

    def abort(self) -> None:
        """Close the socket at once."""
        if self._transport is not None:
            self._transport.abort()
        self._mark_closed()

    def close(self) -> None:
        """Flush, then close the socket."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class does not inherit from it
        self._transport.set_write_buffer_limits(high=0)  # so that it tells whether bytes wait; `write` sends at once

    def pause_writing(self) -> None:
        self._has_sent.clear()

    def resume_writing(self) -> None:
        self._has_sent.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._mark_closed()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._buffer.feed(data):
                self._on_message(_decode(body))
        except (msgspec.DecodeError, ValueError):
            self.abort()  # the other end does not speak this protocol

    def _on_message(self, message: _Message) -> None:
        if isinstance(message, _Open):
            if len(self.channels) >= _MAX_CHANNELS:
                raise ValueError("too many channels")
            channel = self.channels[message.channel] = Channel(self, message.channel, is_ours=False)
            self._on_channel(channel, message.kind, message.head)
            return
        if isinstance(message, _Close):
            working = self.working.pop(message.channel, None)
            if working is not None:
                working.over()
        known = self.channels.get(message.channel)
        if known is not None:  # else this end has closed it meanwhile
            known._on_message(message)

    def _mark_closed(self) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._has_sent.set()
        for channel in list(self.channels.values()):
            channel._on_lost(LinkLost())
        working, self.working = self.working, {}
        for channel in working.values():
            channel.over()
        self._on_lost()
