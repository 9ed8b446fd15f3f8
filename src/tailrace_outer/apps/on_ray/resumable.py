"""A user's app whose streams are in a log store: the part of the front of `tailrace run` that a replica on Ray has."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import MutableMapping
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.dialects import native
from tailrace.errors import TailraceError
from tailrace.http.asgi_answers import error_answer
from tailrace.types import ANONYMOUS
from tailrace.wording import shown_path
from tailrace_outer.apps.answer_body import QueuedBody
from tailrace_outer.apps.app_streams import AppStreams
from tailrace_outer.apps.offers import take_offer
from tailrace_outer.apps.on_ray.ray_names import OwnRequest
from tailrace_outer.apps.on_ray.stream_thread import StreamThread, reporting_disconnects
from tailrace_outer.apps.stream_routes import event_id_of, resumed
from tailrace_outer.serve.failures import failed, refusal_of
from tailrace_outer.serve.link import ChannelClosed
from tailrace_outer.serve.stream import StreamOffer

__all__ = ["ResumableApp"]

_encode = msgspec.msgpack.encode


class ResumableApp:
    """An ASGI application around the app with this name. Streams that the app begins go to the streams of `thread`.

    When the app is shut down, its streams may go on for `drain_s` before that.
    """

    def __init__(self, app: ASGIApp, name: str, thread: StreamThread, *, drain_s: float) -> None:
        self.app = app
        self.name = name
        self.thread = thread
        self.calls: set[asyncio.Task[None]] = set()  # of the app, with or without a client
        self._drain_s = drain_s

    async def close(self) -> None:
        """Let streams end, and interrupt the rest. A second call does nothing."""
        await self.thread.stop(drain_s=self._drain_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":

            async def receive_drained() -> Message:
                message = await receive()
                if message["type"] == "lifespan.shutdown":
                    await self.close()
                return message

            await self.app(scope, receive_drained, send)
        elif scope["type"] != "http":
            await self.app(scope, receive, send)
        elif event_id_of(scope):
            await self.thread.answer(lambda streams: resumed(streams, scope, self.name), scope, receive, send)
        else:
            await _Call(self, scope, receive, send).run()


class _Call:
    """One request to the app. If its answer is a stream, the app goes on when the client has left."""

    def __init__(self, host: ResumableApp, scope: Scope, receive: Receive, send: Send) -> None:
        self._host = host
        self._thread = host.thread
        extensions = {**(scope.get("extensions") or {}), "tailrace": {}}  # asks `serve.stream` for frames
        self._scope: MutableMapping[str, Any] = {**scope, "extensions": extensions}
        self._receive = reporting_disconnects(receive)
        self._send = send
        self._in_body = True  # more of the request's body is to come
        self._body: QueuedBody | None = None  # of a stream
        self._began: asyncio.Future[ASGIApp] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None]
        self._own_request = OwnRequest()

    async def run(self) -> None:
        """Answer the request. Raises: what the app raises."""
        self._task = asyncio.get_running_loop().create_task(self._run_app(), context=self._own_request.context)
        self._host.calls.add(self._task)
        self._task.add_done_callback(self._host.calls.discard)
        try:
            either: list[asyncio.Future[Any]] = [self._task, self._began]  # Any: their results differ
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not self._began.done():
                self._stop()
                await asyncio.gather(self._task, return_exceptions=True)
            raise
        if not self._began.done():
            await self._task
            return

        async def begun(_: AppStreams) -> ASGIApp:
            return self._began.result()

        await self._thread.answer(begun, self._scope, self._receive, self._send)

    def _stop(self) -> None:
        self._own_request.cancel_calls()
        self._task.cancel()

    async def _run_app(self) -> None:
        failure: bytes | None = None
        try:
            await self._host.app(self._scope, self._receive_for_app, self._send_of_app)
        except ChannelClosed:
            pass
        except Exception as error:
            if self._body is None:
                raise
            report = failed(error, f"{self._scope['method']} {shown_path(self._scope['path'])}")
            sys.stderr.write(f"{report.message}\n{report.traceback}")
            failure = _encode(refusal_of(error))
        finally:
            if self._body is not None:
                self._thread.call(self._body.finish, failure)

    async def _receive_for_app(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._in_body = bool(message.get("more_body"))
        elif self._began.done():
            await asyncio.Event().wait()  # the app does not learn that the stream's first reader has left
        return message

    async def _send_of_app(self, message: Message) -> None:
        if self._body is not None:
            await self._thread.run(self._body.put(_encode(dict(message))))
            return
        if message["type"] == "http.response.start":
            message["headers"] = [(bytes(name), bytes(value)) for name, value in message.get("headers") or ()]
            offer = take_offer(message, method=self._scope["method"], in_body=self._in_body)
            if offer is not None:
                await self._begin(offer, message)
                return
        await self._send(message)

    async def _begin(self, offer: StreamOffer, start: Message) -> None:
        loop = asyncio.get_running_loop()
        headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in start["headers"]]
        body = self._body = QueuedBody(lambda: loop.call_soon_threadsafe(self._stop))
        try:
            answer = await self._thread.run(
                self._thread.streams.begin(offer, ANONYMOUS, self._host.name, body, headers, on_over=lambda: None)
            )
        except TailraceError as error:
            answer = error_answer(native.WIRE, error)
            self._stop()
        self._began.set_result(answer)
