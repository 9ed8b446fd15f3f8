"""Calling another deployment: what `bind` leaves in the place of an app among its arguments."""

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

from tailrace.serve.closing import close_if_left
from tailrace.serve.context import RequestContext, get_request_context
from tailrace.serve.exceptions import DeploymentUnavailableError, RequestCancelledError, ServeError
from tailrace.serve.link import Channel, ChannelClosed, Link, LinkLost

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

# The calls that the running code has made, for whoever ends it. None outside of a replica.
open_calls: ContextVar[WeakSet[PendingCall] | None] = ContextVar("tailrace_calls", default=None)

_FOREIGN = ("multiplexed_model_id", "request_serialization", "response_serialization", "session_id")
T = TypeVar("T")


class CallHead(msgspec.Struct, array_like=True):
    """Whom a channel of kind "call" is for. Its first message is the pickled arguments; the answers are pickles."""

    app: str
    deployment: str
    method: str
    is_stream: bool
    context: RequestContext


class _Connection(NamedTuple):
    """This process's way to the front."""

    link: Link
    loop: asyncio.AbstractEventLoop


_connection: _Connection | None = None


def connect(link: Link, loop: asyncio.AbstractEventLoop) -> None:
    """Have the handles of this process go over this link."""
    global _connection  # there is one front to a process
    _connection = _Connection(link, loop)


def disconnect() -> None:
    """Have no handle of this process go anywhere."""
    global _connection  # there is one front to a process
    _connection = None


def is_connected() -> bool:
    return _connection is not None


def _connected() -> _Connection:
    if _connection is None:
        raise ServeError("Handles work in apps that `tailrace run` or `serve.run` has started.")
    return _connection


class DeploymentHandle:
    """A deployment of the same app, wherever it runs. `handle.method.remote(…)` calls a method of it,
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
        """A handle that calls this method, and whose calls are streams or are not.

        Raises: TypeError for an option that nobody knows; those of Ray that mean nothing here are named in a warning.
        """
        for name in others:
            if name not in _FOREIGN:
                raise TypeError(f"Handles have no option {name}.")
            logger.warning("%s: the option %s of handles means nothing here.", self.deployment_name, name)
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
        """Call it. Begins at once, from any thread; a response among the arguments is waited for first."""
        head = CallHead(self.app_name, self.deployment_name, self._method_name, self._stream, get_request_context())
        asked = PendingCall(_connected(), head, args, kwargs)
        return DeploymentResponseGenerator(asked) if self._stream else DeploymentResponse(asked)

    def __reduce__(self) -> tuple[Any, ...]:
        return _handle, (self.deployment_name, self.app_name, self._method_name, self._stream)

    def __repr__(self) -> str:
        return f"DeploymentHandle({self.deployment_name!r})"


def _handle(deployment_name: str, app_name: str, method_name: str, stream: bool) -> DeploymentHandle:
    return DeploymentHandle(deployment_name, app_name, method_name=method_name, stream=stream)


class PendingCall:
    """One call under way. Its coroutines run on the connection's loop, whoever waits."""

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
        """Whether the caller is on the connection's loop, and must not wait."""
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    async def _begin(self) -> Channel:
        """Raises: what a response among the arguments raises."""
        args = [await _answer_of(item) for item in self._args]
        kwargs = {name: await _answer_of(item) for name, item in self._kwargs.items()}
        payload = cloudpickle.dumps((args, kwargs))
        channel = self._link.open("call", msgspec.msgpack.encode(self._head))
        self._channel = channel
        with contextlib.suppress(ChannelClosed):  # whoever waits for the answer hears of it
            await channel.send(payload)
        return channel

    async def next(self) -> Any:  # Any: what the method gives
        """The next answer. Raises: StopAsyncIteration at the end, or what the method raised."""
        begun = self._begun
        try:
            channel = await (begun if isinstance(begun, asyncio.Task) else asyncio.wrap_future(begun))
        except asyncio.CancelledError:
            if self._is_cancelled:  # by whoever made the call, and not whoever waits for it
                raise RequestCancelledError("This call was cancelled.") from None
            raise
        try:
            if self._is_cancelled:
                raise ChannelClosed
            return pickle.loads(await channel.receive())  # noqa: S301  # from another part of the same app
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
            raise DeploymentUnavailableError(f"{self._head.deployment} has given no answer.") from None

    def cancel(self) -> None:
        self._is_cancelled = True
        self.close_soon()

    def close_soon(self, *_: object) -> None:
        """From any thread, and as the callback of a future."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.close)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        else:
            self._begun.cancel()


class DeploymentResponse:
    """The answer to a call: awaited on the event loop, `result()` elsewhere. May be given to another call as it is."""

    def __init__(self, asked: PendingCall) -> None:
        self._asked = asked
        self._answer = asked.start(asked.first())
        self._answer.add_done_callback(asked.close_soon)  # also when it is cancelled before its first step

    def __await__(self) -> Generator[Any, None, Any]:  # Any: what the method gives
        answer = self._answer
        return (answer if isinstance(answer, asyncio.Task) else asyncio.wrap_future(answer)).__await__()

    def result(self, timeout_s: float | None = None) -> Any:  # Any: what the method gives
        """Wait for the answer, anywhere but on the event loop. Raises: TimeoutError, or what the method raised."""
        if isinstance(self._answer, asyncio.Task):
            raise RuntimeError("On the event loop a response is awaited; result() would block it.")
        return self._answer.result(timeout_s)

    def cancel(self) -> None:
        """Have the call end; whoever waits gets RequestCancelledError. Does nothing when it has ended."""
        if not self._answer.done():
            self._asked.cancel()


class DeploymentResponseGenerator:
    """The answers of a call made with `stream=True`, one after the other."""

    def __init__(self, asked: PendingCall) -> None:
        self._asked = asked
        close_if_left(self)

    def __aiter__(self) -> AsyncIterator[Any]:  # Any: what the method gives
        return self

    async def __anext__(self) -> Any:  # Any: what the method gives
        asked = self._asked
        if asked.is_here:
            return await asked.next()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked.next(), asked.loop))

    def __iter__(self) -> Iterator[Any]:  # Any: what the method gives
        return self

    def __next__(self) -> Any:  # Any: what the method gives
        if self._asked.is_here:
            raise RuntimeError("On the event loop a stream is iterated with `async for`.")
        try:
            return asyncio.run_coroutine_threadsafe(self._asked.next(), self._asked.loop).result()
        except StopAsyncIteration:
            raise StopIteration from None

    def cancel(self) -> None:
        """Have the call end; iterating on raises RequestCancelledError."""
        self._asked.cancel()

    async def aclose(self) -> None:
        """Have the call end without a word."""
        self._asked.close_soon()

    def __del__(self) -> None:
        self._asked.close_soon()


async def _answer_of(value: Any) -> Any:  # Any: an argument
    return await value if isinstance(value, DeploymentResponse) else value


def pack_failure(error: BaseException) -> bytes:
    """An exception for the way back. One that cannot be pickled is told of."""
    try:
        packed: bytes = cloudpickle.dumps(error)
        pickle.loads(packed)  # noqa: S301  # ours, made just now: some pickle and do not come back
    except Exception:
        packed = cloudpickle.dumps(ServeError(f"{type(error).__name__}: {error}"))
    return packed


def _unpack_failure(packed: bytes) -> BaseException:
    try:
        error = pickle.loads(packed)  # noqa: S301  # from another part of the same app
    except Exception as problem:
        return ServeError(f"The call failed, and its exception cannot be read here: {type(problem).__name__}.")
    return error if isinstance(error, BaseException) else ServeError(str(error))
