"""Requests that a part of the server sends to the server itself, in the name of a client. They take the same way as
that client's own, without a socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope

from tailrace.access.principal import PRINCIPAL, Principal
from tailrace.http.asgi_answers import ANSWERED
from tailrace.streams import StreamLog

__all__ = ["FOUND_ONLY", "InnerAnswer", "InnerStream", "begin", "post"]

FOUND_ONLY = "tailrace_found_only"  # in a scope: whether only the stream of its Idempotency-Key may answer it


@dataclass(frozen=True, slots=True)
class InnerAnswer:
    """A whole answer. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


async def post(
    app: ASGIApp,
    path: str,
    body: bytes,
    *,
    principal: Principal,
    address: str,
    headers: Mapping[str, str],
    logs: list[StreamLog[Any]],  # Any: of a model or of an app
) -> InnerAnswer:
    """Return the answer of an application to a body in JSON. `address` is that of the client. `logs` gets the stream
    that answers, as soon as there is one.

    *Cancellation:* as if the client left.
    """
    answered: list[Message] = []

    async def send(message: Message) -> None:
        answered.append(message)

    await app(_scope(path, body, principal, address, headers, logs), _sent(body), send)
    start, *parts = answered
    return InnerAnswer(start["status"], _headers(start), b"".join(part.get("body", b"") for part in parts))


@dataclass(frozen=True, slots=True)
class InnerStream:
    """An answer that has begun. `parts` is its body, as it comes; the application waits until a part is taken."""

    status: int
    headers: Mapping[str, str]
    parts: AsyncIterator[bytes]


@contextlib.asynccontextmanager
async def begin(
    app: ASGIApp,
    path: str,
    body: bytes,
    *,
    principal: Principal,
    address: str,
    headers: Mapping[str, str],
    logs: list[StreamLog[Any]],  # Any: of a model or of an app
    found_only: bool = False,
) -> AsyncIterator[InnerStream]:
    """Context of an answer like that of `post`, as it comes. The end of the context is as if the client left. With
    `found_only` no stream begins: without one of its Idempotency-Key, the answer is UnknownStream."""
    answered: asyncio.Queue[Message] = asyncio.Queue(1)

    async def answer() -> None:
        scope = _scope(path, body, principal, address, headers, logs)
        scope[FOUND_ONLY] = found_only
        await app(scope, _sent(body), answered.put)

    async def parts() -> AsyncIterator[bytes]:
        has_more = True
        while has_more:
            message = await _next(answered, answering)
            has_more = message.get("more_body", False)
            if part := message.get("body", b""):
                yield part

    answering = asyncio.create_task(answer())
    try:
        start = await _next(answered, answering)
        yield InnerStream(start["status"], _headers(start), parts())
    finally:
        answering.cancel()
        await asyncio.wait([answering])


async def _next(answered: asyncio.Queue[Message], answering: asyncio.Task[None]) -> Message:
    """Return the next message of an application. Raises: what the application raises."""
    getting = asyncio.create_task(answered.get())
    try:
        await asyncio.wait([getting, answering], return_when=asyncio.FIRST_COMPLETED)
        if not getting.done():
            answering.result()
            raise RuntimeError("The application ended before its answer.")
        return getting.result()
    finally:
        getting.cancel()


def _scope(
    path: str,
    body: bytes,
    principal: Principal,
    address: str,
    headers: Mapping[str, str],
    logs: list[StreamLog[Any]],  # Any: of a model or of an app
) -> Scope:
    given = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body)), **headers}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in given.items()],
        "client": (address, 0) if address else None,
        "server": None,
        PRINCIPAL: principal,
        ANSWERED: logs,
    }


def _sent(body: bytes) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # the client stays

    return receive


def _headers(start: Message) -> Mapping[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
