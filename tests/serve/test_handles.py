"""Handles over a real link, with a fake front at the other end."""

from __future__ import annotations

import asyncio
import gc
import pickle
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import msgspec
import pytest
from tests.waiting import LONG_S, turn

from tailrace.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    RequestCancelledError,
)
from tailrace_outer.serve.handles import CallHead, DeploymentHandle, connect, disconnect, pack_failure
from tailrace_outer.serve.link import Channel, ChannelClosed, Link


@dataclass
class _Front:
    """A front with `double(x)`, `count(n)` as a stream, `fail()`, `hang()`, and `end()`, which does not answer."""

    link: Link
    asked: list[tuple[str, str, bool]] = field(default_factory=list)
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def opened(self, channel: Channel, kind: str, head: bytes) -> None:
        assert kind == "call"
        task = asyncio.get_running_loop().create_task(
            self._answer(channel, msgspec.msgpack.decode(head, type=CallHead))
        )
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, channel: Channel, head: CallHead) -> None:
        self.asked.append((head.deployment, head.method, head.is_stream))
        try:
            args, kwargs = pickle.loads(await channel.receive())
            match head.method:
                case "double" | "__call__":
                    await channel.send(pickle.dumps(2 * (args[0] if args else kwargs["x"])))
                case "count":
                    for number in range(args[0]):
                        await channel.send(pickle.dumps(number))
                case "fail":
                    return channel.close(pack_failure(args[0]))
                case "hang":
                    self.hanging.set()
                    await channel.receive()
            channel.close()
        except ChannelClosed:
            self.left.set()


@pytest.fixture
async def front() -> AsyncIterator[_Front]:
    loop = asyncio.get_running_loop()
    answering = _Front(
        Link(lambda channel, kind, head: answering.opened(channel, kind, head), lambda: None, is_front=True)
    )
    ours = Link(lambda channel, kind, head: None, lambda: None, is_front=False)
    for link, sock in zip((answering.link, ours), socket.socketpair(), strict=True):
        await loop.create_unix_connection(lambda link=link: link, sock=sock)  # type: ignore[misc]  # of the loop
    connect(ours, loop)
    yield answering
    disconnect()
    async with asyncio.timeout(LONG_S):
        while ours.num_channels:  # calls that nobody waited for end, and streams that nobody holds are collected
            gc.collect()
            await asyncio.sleep(0.01)
    ours.abort()
    answering.link.abort()
    await asyncio.gather(*answering.tasks)


@pytest.fixture
def handle() -> Any:  # Any: its methods are whatever one asks for
    return DeploymentHandle("Bot")


async def test_awaited_on_the_loop(front: _Front, handle: Any) -> None:
    response = handle.double.remote(4)
    assert (await response, await response) == (8, 8)
    assert await handle.remote(x=5) == 10
    assert await handle.options(method_name="double").remote(1) == 2
    assert front.asked == [("Bot", "double", False), ("Bot", "__call__", False), ("Bot", "double", False)]


async def test_a_response_as_an_argument_is_waited_for(front: _Front, handle: Any) -> None:
    assert await handle.double.remote(handle.double.remote(x=handle.double.remote(1))) == 8
    with pytest.raises(KeyError):
        await handle.double.remote(handle.fail.remote(KeyError("inner")))


async def test_result_from_another_thread(front: _Front, handle: Any) -> None:
    def ask() -> object:
        response = handle.double.remote(4)
        return handle.double.remote(response).result(timeout_s=LONG_S)

    def wait() -> object:
        response = handle.hang.remote()
        try:
            return response.result(timeout_s=0.05)
        finally:
            response.cancel()  # it goes on otherwise

    assert await asyncio.to_thread(ask) == 16
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(wait)
    with pytest.raises(RuntimeError, match="Use `await`"):
        handle.double.remote(1).result()


async def test_streams(front: _Front, handle: Any) -> None:
    stream = handle.options(stream=True).count.remote(3)
    assert [item async for item in stream] == [0, 1, 2]
    assert await asyncio.to_thread(lambda: list(handle.options(stream=True).count.remote(3))) == [0, 1, 2]

    async def elsewhere() -> list[object]:
        return [item async for item in handle.options(stream=True).count.remote(3)]

    assert await asyncio.to_thread(lambda: asyncio.run(elsewhere())) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="async for"):
        next(handle.options(stream=True).count.remote(1))


async def test_what_a_call_raises(front: _Front, handle: Any) -> None:
    with pytest.raises(KeyError, match="a key"):
        await handle.fail.remote(KeyError("a key"))
    with pytest.raises(BackPressureError) as refused:
        await handle.fail.remote(BackPressureError("full", status=503, retry_after_s=4))
    assert (refused.value.status, refused.value.retry_after_s) == (503, 4)
    with pytest.raises(DeploymentUnavailableError, match="no result"):
        await handle.end.remote()
    with pytest.raises(TypeError, match="pickle"):
        await handle.double.remote(asyncio.get_running_loop())


def test_exceptions_that_cannot_be_pickled() -> None:
    class Stubborn(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__("made of two")

    with socket.socket() as held:
        told = pickle.loads(pack_failure(ValueError("holds", held)))
    assert isinstance(told, RayServeException)
    assert str(told).startswith("ValueError: ('holds'")
    assert str(pickle.loads(pack_failure(Stubborn(1, 2)))) == "Stubborn: made of two"


async def test_cancelling_a_call(front: _Front, handle: Any) -> None:
    response = handle.hang.remote()
    await front.hanging.wait()
    response.cancel()
    with pytest.raises(RequestCancelledError):
        await response
    await front.left.wait()
    response.cancel()  # does nothing


async def test_cancelling_before_the_call_has_started(front: _Front, handle: Any) -> None:
    hanging = handle.hang.remote()
    response = handle.double.remote(hanging)
    response.cancel()
    with pytest.raises(RequestCancelledError):
        await response
    hanging.cancel()
    assert [method for _, method, _ in front.asked].count("double") == 0


async def test_cancelling_the_waiting_task_cancels_the_call(front: _Front, handle: Any) -> None:
    """The cancellation may also come in the turn of the event loop in which the call was made."""

    async def wait() -> None:
        await handle.hang.remote()

    for num_turns in range(5):
        front.left.clear()
        front.hanging.clear()
        waiting = asyncio.create_task(wait())
        await turn(num_turns)
        if num_turns == 4:
            await front.hanging.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await front.left.wait()


async def test_cancelling_a_stream(front: _Front, handle: Any) -> None:
    stream = handle.options(stream=True).count.remote(1_000_000)
    assert await anext(stream) == 0
    stream.cancel()
    with pytest.raises(RequestCancelledError):
        await anext(stream)
    await front.left.wait()
    front.left.clear()
    stream = handle.options(stream=True).count.remote(1_000_000)
    assert await anext(stream) == 0
    await stream.aclose()
    await front.left.wait()


async def test_an_unreferenced_stream_is_closed(front: _Front, handle: Any) -> None:
    stream = handle.options(stream=True).count.remote(1_000_000)
    assert await anext(stream) == 0
    del stream
    gc.collect()
    await front.left.wait()


async def test_a_lost_front_ends_calls(front: _Front, handle: Any) -> None:
    response = handle.hang.remote()
    await front.hanging.wait()
    front.link.abort()
    with pytest.raises(DeploymentUnavailableError, match="stopped"):
        await response


async def test_options_of_handles(front: _Front, handle: Any, caplog: pytest.LogCaptureFixture) -> None:
    handle.options(multiplexed_model_id="x", session_id="y")
    assert "multiplexed_model_id of handles is ignored" in caplog.text
    with pytest.raises(TypeError, match="Handles have no option nothing"):
        handle.options(nothing=1)


async def test_handles_can_be_pickled(front: _Front, handle: Any) -> None:
    again = pickle.loads(cloudpickle.dumps(handle.options(stream=True).count))
    assert [item async for item in again.remote(2)] == [0, 1]
    assert repr(again) == "DeploymentHandle('Bot')"
    with pytest.raises(AttributeError):
        _ = again._hidden_from_calls


def test_without_a_front(handle: Any) -> None:
    with pytest.raises(RayServeException, match=r"Handles only work in apps"):
        handle.remote()
