"""Both ends of a link in one event loop, over a real socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from tests.waiting import idle, turn

from tailrace_outer.serve.link import MAX_MESSAGE_BYTES, Channel, ChannelClosed, Link, LinkLost

_WINDOW_BYTES = 256 * 2**10


@dataclass
class _Pair:
    ours: Link
    theirs: Link
    opened: asyncio.Queue[tuple[Channel, str, bytes]]
    lost: list[str] = field(default_factory=list)

    async def channel(self, kind: str = "talk", head: bytes = b"") -> tuple[Channel, Channel]:
        here = self.ours.open(kind, head)
        there, _, _ = await self.opened.get()
        return here, there


@pytest.fixture
async def pair() -> AsyncIterator[_Pair]:
    opened: asyncio.Queue[tuple[Channel, str, bytes]] = asyncio.Queue()
    lost: list[str] = []

    def on_opened(channel: Channel, kind: str, head: bytes) -> None:
        opened.put_nowait((channel, kind, head))

    ours = Link(on_opened, lambda: lost.append("ours"), is_front=True)
    theirs = Link(on_opened, lambda: lost.append("theirs"), is_front=False)
    loop = asyncio.get_running_loop()
    for link, sock in zip((ours, theirs), socket.socketpair(), strict=True):
        await loop.create_unix_connection(lambda link=link: link, sock=sock)  # type: ignore[misc]  # of the loop
    yield _Pair(ours, theirs, opened, lost)
    ours.abort()
    theirs.abort()
    await idle()


async def test_messages_arrive_in_order_and_channels_do_not_mix(pair: _Pair) -> None:
    one = pair.ours.open("talk", b"first")
    two = pair.theirs.open("talk back")
    arrived = {kind: (channel, head) for channel, kind, head in [await pair.opened.get() for _ in range(2)]}
    there, head = arrived["talk"]
    here, _ = arrived["talk back"]
    assert head == b"first"
    for number in range(100):
        await one.send(b"%d" % number)
        await two.send(b"back %d" % number)
    assert [await there.receive() for _ in range(100)] == [b"%d" % number for number in range(100)]
    assert [await here.receive() for _ in range(100)] == [b"back %d" % number for number in range(100)]


async def test_only_the_sender_waits_for_a_slow_receiver(pair: _Pair) -> None:
    slow, slow_end = await pair.channel()
    quick, quick_end = await pair.channel()
    sent = 0

    async def send_on() -> None:
        nonlocal sent
        for _ in range(100):
            await slow.send(b"x" * 32 * 2**10)
            sent += 1

    sending = asyncio.create_task(send_on())
    for _ in range(50):
        await quick.send(b"y")
        assert await quick_end.receive() == b"y"
    assert sent * 32 * 2**10 <= _WINDOW_BYTES + 32 * 2**10
    for _ in range(100):
        await slow_end.receive()
    await sending


async def test_empty_messages_count_too(pair: _Pair) -> None:
    here, there = await pair.channel()
    sent = 0

    async def send_on() -> None:
        nonlocal sent
        while True:
            await here.send(b"")
            sent += 1

    sending = asyncio.create_task(send_on())
    await idle()
    assert 0 < sent < 10_000
    there.close()
    with pytest.raises(ChannelClosed):
        await sending


async def test_no_message_is_lost_when_a_receiver_is_cancelled(pair: _Pair) -> None:
    here, there = await pair.channel()
    for number in range(20):
        waiting = asyncio.create_task(there.receive())
        await idle()
        if number % 2:
            here.post(b"%d" % number)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            waiting.cancel()
            here.post(b"%d" % number)
        assert await there.receive() == b"%d" % number


async def test_a_cancelled_sender_has_sent_nothing(pair: _Pair) -> None:
    here, there = await pair.channel()
    await here.send(b"x" * _WINDOW_BYTES)
    waiting = asyncio.create_task(here.send(b"never"))
    other = asyncio.create_task(here.send(b"later"))
    await idle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await there.receive() == b"x" * _WINDOW_BYTES
    await other
    assert await there.receive() == b"later"


async def test_messages_before_the_end_are_received(pair: _Pair) -> None:
    here, there = await pair.channel()
    ended = asyncio.Event()
    there.on_close = ended.set
    await here.send(b"last words")
    here.close(b"because")
    await ended.wait()
    assert there.is_closed
    assert await there.receive() == b"last words"
    for _ in range(2):
        with pytest.raises(ChannelClosed) as closed:
            await there.receive()
        assert closed.value.failure == b"because"
        assert not isinstance(closed.value, LinkLost)
    with pytest.raises(ChannelClosed):
        await there.send(b"too late")
    there.close()
    here.close()  # does nothing
    assert (pair.ours.num_channels, pair.theirs.num_channels) == (0, 0)


async def test_closing_wakes_waiting_tasks(pair: _Pair) -> None:
    here, there = await pair.channel()
    await here.send(b"x" * _WINDOW_BYTES)
    sending, receiving = asyncio.create_task(here.send(b"y")), asyncio.create_task(here.receive())
    await idle()
    there.close()
    for waiting in (sending, receiving):
        with pytest.raises(ChannelClosed):
            await waiting


async def test_both_may_close_at_once(pair: _Pair) -> None:
    here, there = await pair.channel()
    here.close()
    there.close()
    again, end = await pair.channel()  # what crossed is no harm
    await again.send(b"on")
    assert await end.receive() == b"on"


async def test_a_lost_link_ends_everything_on_it(pair: _Pair) -> None:
    here, there = await pair.channel()
    left: list[str] = []
    here.on_close = lambda: left.append("here")
    waiting = asyncio.create_task(here.receive())
    await idle()
    pair.theirs.abort()
    with pytest.raises(LinkLost):
        await waiting
    with pytest.raises(LinkLost):
        await there.receive()
    assert left == ["here"]
    assert sorted(pair.lost) == ["ours", "theirs"]
    assert pair.ours.is_lost
    late = pair.ours.open("talk")
    with pytest.raises(LinkLost):
        await late.send(b"x")


async def test_closing_a_link_sends_written_messages(pair: _Pair) -> None:
    here, there = await pair.channel()
    here.post(b"x" * 100_000)
    here.close()
    pair.ours.close()
    assert await there.receive() == b"x" * 100_000


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 8, b"\x02\x00\x00\x00\x93\x09", b"\0" * 4])
async def test_invalid_bytes_close_the_link(garbage: bytes) -> None:
    loop = asyncio.get_running_loop()
    lost = asyncio.Event()
    link = Link(lambda channel, kind, head: None, lost.set, is_front=True)
    sock, other = socket.socketpair()
    await loop.create_unix_connection(lambda: link, sock=sock)
    channel = link.open("talk")
    with other:
        other.sendall(garbage)
        await lost.wait()
    with pytest.raises(LinkLost):
        await channel.receive()


async def test_a_too_long_message_fails_its_sender_and_not_the_link(pair: _Pair) -> None:
    here, there = await pair.channel()
    with pytest.raises(ValueError, match="is too long: the limit between processes"):
        await here.send(b"x" * (MAX_MESSAGE_BYTES + 1))
    with pytest.raises(ValueError, match="is too long"):
        pair.ours.open("talk", b"x" * (MAX_MESSAGE_BYTES + 1))
    await here.send(b"fine")
    assert await there.receive() == b"fine"


async def test_work_begins_when_the_other_end_can_know_it() -> None:
    """`begin` returns when its message is in the kernel, also if the socket was full: what follows may block or kill
    this process."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    link = Link(lambda *_: None, lambda: None, is_front=False)
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
    channel, other = link.open("talk"), link.open("fill")
    await channel.begin()
    assert theirs.recv(1 << 16)  # without a turn of the event loop
    for _ in range(20):
        other.post(bytes(100_000))
    begun = asyncio.create_task(channel.begin())
    await idle()
    assert not begun.done()
    while not begun.done():
        with contextlib.suppress(BlockingIOError):
            theirs.recv(1 << 20)
        await turn()
    link.abort()
    theirs.close()


async def test_a_link_that_is_lost_keeps_nobody_waiting() -> None:
    ours, theirs = socket.socketpair()
    link = Link(lambda *_: None, lambda: None, is_front=False)
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
    channel = link.open("fill")
    for _ in range(20):
        channel.post(bytes(100_000))
    begun = asyncio.create_task(channel.begin())
    await idle()
    assert not begun.done()
    theirs.close()
    await begun
