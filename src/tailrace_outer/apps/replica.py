"""A process of user code: `python -m tailrace_outer.apps.replica FD PARENT_PID LOG_LEVEL`.

It imports an app, becomes one of its deployments, and serves the channels that the front opens: requests as ASGI
messages, calls from other deployments, health checks and metrics. The user's code runs on this process's event loop, in
the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import pickle
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import anyio
import anyio.to_thread
import msgspec
from starlette.types import ASGIApp

from tailrace.system import eventloop
from tailrace.system.child import begin_child, end_family_with_me
from tailrace_outer.apps.anyio_names import task_in_thread
from tailrace_outer.apps.asgi import Lifespan, serve_request
from tailrace_outer.apps.target import describe, load
from tailrace_outer.apps.watch import LoopWatch
from tailrace_outer.serve.boot import AppTarget, Assignment, Described
from tailrace_outer.serve.calling import as_async_iterator, call
from tailrace_outer.serve.closing import Scope, closing_generators
from tailrace_outer.serve.context import set_max_ongoing_requests, set_request_context
from tailrace_outer.serve.deployment import Application, bound, nodes
from tailrace_outer.serve.exceptions import DeploymentUnavailableError, ServeError
from tailrace_outer.serve.failures import failed
from tailrace_outer.serve.handles import CallHead, DeploymentHandle, PendingCall, connect, open_calls, pack_failure
from tailrace_outer.serve.ingress import asgi_of
from tailrace_outer.serve.link import Channel, ChannelClosed, Link

__all__ = ["main"]

logger = logging.getLogger("tailrace.serve")

_CANCEL_TIMEOUT_S = 1.0
_DISCONNECT_TIMEOUT_S = 10.0  # for an app to notice that a WebSocket's client has left
_torn_down: list[object] = []  # keeps instances alive to the end, so that __del__ does not run a second time
_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.decode


class Replica:
    """One deployment of an app, in this process."""

    def __init__(self) -> None:
        self._stopped = asyncio.Event()
        self._target: AppTarget | None = None
        self._app: Application | None = None
        self._instance: Any = None  # Any: the user's, or the function itself
        self._asgi: ASGIApp | None = None
        self._lifespan: Lifespan | None = None
        self._watch = LoopWatch()
        self._health_threads = anyio.CapacityLimiter(
            1
        )  # so that health checks work while all of the app's threads are busy
        self._app_name = ""
        self._phase = ""  # the phase of the start, for error messages
        self.link = Link(self._on_channel, self._stopped.set, is_front=False)

    async def run(self, sock: socket.socket) -> None:
        """Serve until the front dies or asks to stop."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self.link, sock=sock)
        connect(self.link, loop)
        with closing_generators():
            await self._stopped.wait()

    def _on_channel(self, channel: Channel, kind: str, head: bytes) -> None:
        serve: Callable[[Channel, bytes], Awaitable[None]] = getattr(self, f"_on_{kind}")
        calls: WeakSet[PendingCall] = WeakSet()
        task = channel.serve(self._serve_channel(serve, channel, head, calls))
        if kind == "websocket":  # the app's next send or receive raises, and it may need time to clean up
            channel.on_close = lambda: asyncio.get_running_loop().call_later(_DISCONNECT_TIMEOUT_S, task.cancel)
        else:
            channel.on_close = partial(_cancel, task, calls)

    async def _serve_channel(
        self,
        serve: Callable[[Channel, bytes], Awaitable[None]],
        channel: Channel,
        head: bytes,
        calls: WeakSet[PendingCall],
    ) -> None:
        open_calls.set(calls)
        with contextlib.suppress(ChannelClosed):
            await serve(channel, head)

    # Start

    async def _on_import(self, channel: Channel, head: bytes) -> None:
        target = self._target = _decode(head, type=AppTarget)
        try:
            self._app, notes = load(target)
            described: Described | None = describe(self._app, target, notes)
            failure = None
        except BaseException as error:  # user code may raise anything, SystemExit too
            described, failure = None, failed(error, f"importing {target.target}")
        channel.post(_encode((described, failure)))

    async def _on_become(self, channel: Channel, head: bytes) -> None:
        assignment = _decode(head, type=Assignment)
        self._phase = "constructing"
        try:
            await self._become(assignment)
            failure = None
        except BaseException as error:
            failure = failed(error, f"{self._phase} {assignment.deployment}")
        channel.post(_encode(failure))
        # reports a blocked loop before the front's health check kills the process
        self._watch.begin(blocked_s=assignment.options.health_check_timeout_s)

    async def _become(self, assignment: Assignment) -> None:
        assert self._app is not None
        assert self._target is not None
        app_name = self._target.app_name
        node = nodes(self._app)[assignment.deployment]
        args, kwargs = bound(self._app, lambda name: DeploymentHandle(name, app_name))(node)
        limit = assignment.options.max_ongoing_requests
        set_max_ongoing_requests(limit)
        anyio.to_thread.current_default_thread_limiter().total_tokens = limit
        body = node.deployment.func_or_class
        if inspect.isclass(body):
            instance = body.__new__(body, *args, **kwargs) if body.__new__ is not object.__new__ else body.__new__(body)
            construct: Any = body.__init__  # may be asynchronous
            constructed = construct(instance, *args, **kwargs)
            if inspect.isawaitable(constructed):
                await constructed
            self._instance = instance
        else:
            self._instance = body
        if "tailrace_outer.serve.model" in sys.modules:  # user code has asked for a model
            from tailrace_outer.serve.model import models_loaded

            await models_loaded()
        if assignment.options.user_config is not None:
            self._phase = "reconfigure of"
            await call(self._instance.reconfigure, (assignment.options.user_config,), {})
        self._app_name = app_name
        self._phase = "the startup of"
        self._asgi = await asgi_of(self._instance)
        self._lifespan = await Lifespan.start(self._asgi)

    # Requests

    async def _on_asgi(self, channel: Channel, head: bytes) -> None:
        assert self._asgi is not None
        assert self._lifespan is not None
        await channel.begin()
        await _in_scope(channel, serve_request(self._asgi, channel, head, self._lifespan.state, self._app_name))

    _on_websocket = _on_asgi

    async def _on_call(self, channel: Channel, head: bytes) -> None:
        call_head = _decode(head, type=CallHead)
        try:
            args, kwargs = pickle.loads(await channel.receive())  # noqa: S301  # the apps of one server trust each other
            set_request_context(call_head.context)
            await _in_scope(channel, self._give_result(channel, call_head, args, kwargs))
        except ChannelClosed:
            raise
        except asyncio.CancelledError:  # cancelled in this process: the caller must not take it for a normal end
            channel.close(pack_failure(DeploymentUnavailableError(f"{call_head.method} was cancelled where it ran.")))
            raise
        except Exception as error:
            channel.close(pack_failure(error))
        except BaseException as error:  # SystemExit must not end this process
            channel.close(pack_failure(ServeError(f"{call_head.method} raised {type(error).__name__}.")))

    async def _give_result(
        self, channel: Channel, call_head: CallHead, args: Any, kwargs: Any
    ) -> None:  # Any: of the method called
        method = self._instance if call_head.method == "__call__" else getattr(self._instance, call_head.method, None)
        if method is None:
            raise AttributeError(f"{call_head.deployment} has no method {call_head.method}.")
        result = await call(method, args, kwargs)
        items = as_async_iterator(result)
        if (items is not None) != call_head.is_stream:
            wanted = (
                "is not a generator; call it without stream=True" if call_head.is_stream else "is a generator; call it "
            )
            raise TypeError(
                f"{call_head.method} {wanted}{'' if call_head.is_stream else 'with .options(stream=True)'}."
            )
        if items is None:
            await channel.send(_pickled(result))
            return
        try:
            async for item in items:
                await channel.send(_pickled(item))
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()

    async def _on_metrics(self, channel: Channel, head: bytes) -> None:
        if "tailrace_outer.serve.metrics" in sys.modules or "prometheus_client" in sys.modules:
            from tailrace_outer.serve.metrics import exposition

            channel.post(exposition())

    async def _on_check(self, channel: Channel, head: bytes) -> None:
        check = getattr(self._instance, "check_health", None)
        try:
            if check is not None:
                await call(check, (), {}, limiter=self._health_threads)
        except Exception as error:
            channel.close(_encode(failed(error, "check_health")))

    async def _on_stop(self, channel: Channel, head: bytes) -> None:
        """Run the user's teardown, then end this process."""
        self._watch.end()
        others = [task for task in self.link.tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        if others:  # requests clean up before the teardown of what they use
            await asyncio.wait(others, timeout=_CANCEL_TIMEOUT_S)
        for step in (self._stop_lifespan, self._stop_instance, stop_models):
            try:
                await step()
            except Exception as error:
                failure = failed(error, "the teardown")
                sys.stderr.write(f"{failure.message}\n{failure.traceback}")
        channel.close()
        await asyncio.sleep(0)  # flushes the channel's close
        self.link.close()
        self._stopped.set()

    async def _stop_lifespan(self) -> None:
        if self._lifespan is not None:
            await self._lifespan.stop()

    async def _stop_instance(self) -> None:
        leave = getattr(type(self._instance), "__del__", None)
        if leave is not None:
            _torn_down.append(self._instance)
            left = leave(self._instance)
            if inspect.isawaitable(left):
                await left


async def _in_scope(channel: Channel, work: Awaitable[None]) -> None:
    """Run the work of a request. Closes the generators that it has begun if the client leaves or the work fails."""
    scope = Scope()
    scope.enter()
    try:
        await work
    except BaseException:
        await scope.close()
        raise
    if channel.is_closed:
        await scope.close()


async def stop_models() -> None:
    """Stop the engines that user code has asked for."""
    if "tailrace_outer.serve.model" in sys.modules:
        from tailrace_outer.serve.model import close_models

        await close_models()


def _cancel(task: asyncio.Task[None], calls: WeakSet[PendingCall]) -> None:
    """Cancel the task of a closed channel, and the calls that it has made. A thread cannot be cancelled: a task that
    waits for one keeps its slot until the thread ends."""
    for call_head in list(calls):
        call_head.cancel()
    thread = task_in_thread(task)
    if thread is None:
        task.cancel()
    else:
        thread.add_done_callback(lambda _: task.cancel())


def _pickled(value: Any) -> bytes:  # Any: what a method gives
    import cloudpickle  # type: ignore[import-untyped]

    packed: bytes = cloudpickle.dumps(value)
    return packed


def main(argv: list[str]) -> None:
    """Run the process. `argv` is the socket's file descriptor, the parent's process id and the log level."""
    fd, parent_pid, log_level = int(argv[0]), int(argv[1]), argv[2]
    begin_child(parent_pid)
    end_family_with_me()  # vLLM in an app starts processes, which would survive with all their memory
    logging.basicConfig(level=log_level.upper(), stream=sys.stderr, format="%(name)s: %(message)s")

    async def run() -> None:
        await Replica().run(socket.socket(fileno=fd))

    with contextlib.suppress(KeyboardInterrupt):
        eventloop.run(run())


if __name__ == "__main__" and sys.argv[1:]:  # without arguments, only tests the imports
    main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # does not wait for the user's threads
