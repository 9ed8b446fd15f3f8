"""Handles: they replace the apps among the arguments of `bind`, and call those apps' deployments."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import pickle
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import cloudpickle  # type: ignore[import-untyped]
import msgspec

from tailrace_outer.serve.closing import close_on_abort
from tailrace_outer.serve.context import RequestContext, get_request_context
from tailrace_outer.serve.exceptions import DeploymentUnavailableError, RequestCancelledError, ServeError
from tailrace_outer.serve.link import Channel, ChannelClosed, Link, LinkLost

__all__ = [
    "CallHead",
    "DeploymentHandle",
    "DeploymentResponse",
    "DeploymentResponseGenerator",
    "PendingCall",
    "connect",
    "disconnect",
    "is_connected",
    "pack_failure",
]

logger = logging.getLogger("tailrace.serve")

# The calls that the current request has made, to cancel them with it. None outside of a replica.
open_calls: ContextVar[WeakSet[PendingCall] | None] = ContextVar("tailrace_calls", default=None)

_RAY_ONLY = ("multiplexed_model_id", "request_serialization", "response_serialization", "session_id")
T = TypeVar("T")


class CallHead(msgspec.Struct, array_like=True):
    """The head of a channel of kind "call". The first message is the pickled arguments; the results are pickles."""

    app: str
    deployment: str
    method: str
    is_stream: bool
    context: RequestContext


class _Connection(NamedTuple):
    """This process's connection to the front."""

    link: Link
    loop: asyncio.AbstractEventLoop


_connection: _Connection | None = None


def connect(link: Link, loop: asyncio.AbstractEventLoop) -> None:
    """Send the calls of this process's handles over this link."""
    global _connection  # one front per process
    _connection = _Connection(link, loop)


def disconnect() -> None:
    """Disconnect this process's handles."""
    global _connection  # one front per process
    _connection = None


def is_connected() -> bool:
    return _connection is not None


def _connected() -> _Connection:
    if _connection is None:
        raise ServeError("Handles only work in apps that `tailrace run` or `serve.run` has started.")
    return _connection


class DeploymentHandle:
    """A reference to a deployment of the same app. `handle.method.remote(…)` calls a method,
    `handle.remote(…)` its `__call__`. Can be pickled."""

    def __init__(
        self, deployment_name: str, app_name: str = "default", *, method_name: str = "__call__", stream: bool = False
    ) -> None:
        self.deployment_name = deployment_name
        self.app_name = app_name
        self._method_name = method_name
        self._stream = stream

    def options(
        self, *, method_name: str | None = None, stream: bool | None = None, **others: object
    ) -> DeploymentHandle:
        """Return a handle that calls this method, with or without streaming.

        Raises: TypeError for an unknown option. Options that only Ray uses are named in a warning.
        """
        for name in others:
            if name not in _RAY_ONLY:
                raise TypeError(f"Handles have no option {name}.")
            logger.warning("%s: the option %s of handles is ignored.", self.deployment_name, name)
        return DeploymentHandle(
            self.deployment_name,
            self.app_name,
            method_name=self._method_name if method_name is None else method_name,
            stream=self._stream if stream is None else stream,
        )

    def __getattr__(self, name: str) -> DeploymentHandle:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.options(method_name=name)

    def remote(
        self, *args: Any, **kwargs: Any
    ) -> DeploymentResponse | DeploymentResponseGenerator:  # Any: the method's
        """Call the method at once, from any thread. A response among the arguments is awaited first."""
        head = CallHead(self.app_name, self.deployment_name, self._method_name, self._stream, get_request_context())
        pending = PendingCall(_connected(), head, args, kwargs)
        return DeploymentResponseGenerator(pending) if self._stream else DeploymentResponse(pending)

    def __reduce__(self) -> tuple[Any, ...]:
        return _handle, (self.deployment_name, self.app_name, self._method_name, self._stream)

    def __repr__(self) -> str:
        return f"DeploymentHandle({self.deployment_name!r})"


def _handle(deployment_name: str, app_name: str, method_name: str, stream: bool) -> DeploymentHandle:
    return DeploymentHandle(deployment_name, app_name, method_name=method_name, stream=stream)


class PendingCall:
    """One running call. Its coroutines run on the connection's loop, whatever thread waits."""

    def __init__(
        self, connection: _Connection, head: CallHead, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:  # Any: the method's
        self.loop = connection.loop
        self._link = connection.link
        self._head = head
        self._args = args
        self._kwargs = kwargs
        self._channel: Channel | None = None
        self._is_cancelled = False
        calls = open_calls.get()
        if calls is not None:
            calls.add(self)
        self._begun = self.start(self._begin())

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T] | asyncio.Task[T]:
        if self.is_here:
            return self.loop.create_task(work)
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    @property
    def is_here(self) -> bool:
        """Whether the caller runs on the connection's loop, and must not block."""
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    async def _begin(self) -> Channel:
        """Send the call. Raises: the exceptions of responses among the arguments."""
        args = [await _result_of(item) for item in self._args]
        kwargs = {name: await _result_of(item) for name, item in self._kwargs.items()}
        payload = cloudpickle.dumps((args, kwargs))
        channel = self._link.open("call", msgspec.msgpack.encode(self._head))
        self._channel = channel
        with contextlib.suppress(ChannelClosed):  # raised again when the result is awaited
            await channel.send(payload)
        return channel

    async def next(self) -> Any:  # Any: what the method gives
        """Return the next result. Raises: StopAsyncIteration at the end, or the method's exception."""
        begun = self._begun
        try:
            channel = await (begun if isinstance(begun, asyncio.Task) else asyncio.wrap_future(begun))
        except asyncio.CancelledError:
            if self._is_cancelled:  # the call was cancelled, not the task that waits for it
                raise RequestCancelledError("This call was cancelled.") from None
            raise
        try:
            if self._is_cancelled:
                raise ChannelClosed
            return pickle.loads(await channel.receive())  # noqa: S301  # the apps of one server trust each other
        except ChannelClosed as end:
            if self._is_cancelled:
                raise RequestCancelledError("This call was cancelled.") from None
            if isinstance(end, LinkLost):
                raise DeploymentUnavailableError("The server has stopped.") from None
            if end.failure is not None:
                raise _unpack_failure(end.failure) from None
            raise StopAsyncIteration from None

    async def first(self) -> Any:  # Any: what the method gives
        try:
            return await self.next()
        except StopAsyncIteration:
            raise DeploymentUnavailableError(f"{self._head.deployment} gave no result.") from None

    def cancel(self) -> None:
        self._is_cancelled = True
        self.close_soon()

    def close_soon(self, *_: object) -> None:
        """Close the channel, from any thread. Also used as the callback of a future."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.close)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        else:
            self._begun.cancel()


class DeploymentResponse:
    """The result of a call: `await` it on the event loop, `result()` elsewhere. Can be an argument of another call."""

    def __init__(self, pending: PendingCall) -> None:
        self._pending = pending
        self._result = pending.start(pending.first())
        self._result.add_done_callback(pending.close_soon)  # also if it is cancelled before its first step

    def __await__(self) -> Generator[Any, None, Any]:  # Any: what the method gives
        result = self._result
        return (result if isinstance(result, asyncio.Task) else asyncio.wrap_future(result)).__await__()

    def result(self, timeout_s: float | None = None) -> Any:  # Any: what the method gives
        """Wait for the result, outside of the event loop. Raises: TimeoutError, or the method's exception."""
        if isinstance(self._result, asyncio.Task):
            raise RuntimeError("Use `await` on the event loop; result() would block it.")
        return self._result.result(timeout_s)

    def cancel(self) -> None:
        """Cancel the call; waiting tasks get RequestCancelledError. Does nothing after its end."""
        if not self._result.done():
            self._pending.cancel()


class DeploymentResponseGenerator:
    """Iterates over the results of a call made with `stream=True`."""

    def __init__(self, pending: PendingCall) -> None:
        self._pending = pending
        close_on_abort(self)

    def __aiter__(self) -> AsyncIterator[Any]:  # Any: what the method gives
        return self

    async def __anext__(self) -> Any:  # Any: what the method gives
        pending = self._pending
        if pending.is_here:
            return await pending.next()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(pending.next(), pending.loop))

    def __iter__(self) -> Iterator[Any]:  # Any: what the method gives
        return self

    def __next__(self) -> Any:  # Any: what the method gives
        if self._pending.is_here:
            raise RuntimeError("Use `async for` on the event loop.")
        try:
            return asyncio.run_coroutine_threadsafe(self._pending.next(), self._pending.loop).result()
        except StopAsyncIteration:
            raise StopIteration from None

    def cancel(self) -> None:
        """Cancel the call; further iteration raises RequestCancelledError."""
        self._pending.cancel()

    async def aclose(self) -> None:
        """Cancel the call, without an exception."""
        self._pending.close_soon()

    def __del__(self) -> None:
        self._pending.close_soon()


async def _result_of(value: Any) -> Any:  # Any: an argument
    return await value if isinstance(value, DeploymentResponse) else value


def pack_failure(error: BaseException) -> bytes:
    """Pickle an exception for the caller. One that cannot be pickled becomes a ServeError with its message."""
    try:
        packed: bytes = cloudpickle.dumps(error)
        pickle.loads(packed)  # noqa: S301  # our own bytes: some exceptions pickle but do not unpickle
    except Exception:
        packed = cloudpickle.dumps(ServeError(f"{type(error).__name__}: {error}"))
    return packed


def _unpack_failure(packed: bytes) -> BaseException:
    try:
        error = pickle.loads(packed)  # noqa: S301  # the apps of one server trust each other
    except Exception as problem:
        return ServeError(f"The call failed, and its exception cannot be unpickled here: {type(problem).__name__}.")
    return error if isinstance(error, BaseException) else ServeError(str(error))
