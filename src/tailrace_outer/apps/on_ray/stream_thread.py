"""The log store of a replica, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.dialects import native
from tailrace.errors import TailraceError
from tailrace.http.asgi_answers import error_answer
from tailrace.settings import Settings
from tailrace.system.eventloop import first_error
from tailrace_outer.apps.app_streams import AppStreams, open_app_streams

__all__ = ["StreamThread", "reporting_disconnects"]

_T = TypeVar("_T")


class StreamThread:
    """The streams of a replica. User code that blocks its own event loop for longer than a lease does not lose them.

    `streams` is used in the thread only, by what `run` and `answer` run there.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, name="tailrace-streams", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._stopping: asyncio.Event
        self.streams: AppStreams

    def check(self) -> None:
        """Raises: RuntimeError if the thread has ended."""
        if not self._thread.is_alive():
            raise RuntimeError("The log store of this replica is closed.")

    async def start(self) -> None:
        """Return when the log store is open. Raises: ModelError if it cannot be opened."""
        self._thread.start()
        await asyncio.wrap_future(self._ready)

    async def stop(self, *, drain_s: float) -> None:
        """Wait for streams to end, interrupt the rest, and end the thread. Does nothing if it has ended."""
        if not self._thread.is_alive():
            return
        await self.run(self._drain(drain_s))
        self._loop.call_soon_threadsafe(self._stopping.set)
        await asyncio.to_thread(self._thread.join)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            found = first_error(error) if isinstance(error, BaseExceptionGroup) else error
            if self._ready.done():
                raise
            self._ready.set_exception(found)

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        with tempfile.TemporaryDirectory(prefix="tailrace-") as directory:
            async with open_app_streams(self._settings, Path(directory)) as streams:
                self.streams = streams
                self._ready.set_result(None)
                await self._stopping.wait()

    async def _drain(self, drain_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self.streams.wait_ended()
        await self.streams.interrupt_all()

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the thread. Cancellation: cancels it there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function in the thread soon."""
        with contextlib.suppress(RuntimeError):  # the thread has ended, and all streams with it
            self._loop.call_soon_threadsafe(function, *args)

    async def answer(
        self, make: Callable[[AppStreams], Awaitable[ASGIApp]], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a request of this event loop with an application that is made and run in the thread."""
        here = asyncio.get_running_loop()

        def from_there(function: Callable[..., Awaitable[_T]]) -> Callable[..., Awaitable[_T]]:
            async def call(*args: Any) -> _T:  # Any: of ASGI
                return await function(*args)

            async def call_there(*args: Any) -> _T:  # Any: of ASGI
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(*args), here))

            return call_there

        await self.run(_answer(make(self.streams), scope, from_there(reporting_disconnects(receive)), from_there(send)))


def reporting_disconnects(receive: Receive) -> Receive:
    """Wrap Ray's `receive` so that every exception becomes `http.disconnect`. Ray raises errors of its call to the
    proxy when the client has disconnected."""

    async def receive_or_disconnect() -> Message:
        try:
            return await receive()
        except Exception:
            return {"type": "http.disconnect"}

    return receive_or_disconnect


async def _answer(making: Awaitable[ASGIApp], scope: Scope, receive: Receive, send: Send) -> None:
    try:
        answer = await making
    except TailraceError as error:
        answer = error_answer(native.WIRE, error)
    await answer(scope, receive, send)
