"""Requests that a part of the server sends to the server itself, in the name of a client. They take the same way as
that client's own, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from tailrace.access.principal import PRINCIPAL, Principal
from tailrace.http.asgi_answers import ANSWERED
from tailrace.streams import StreamLog

__all__ = ["InnerAnswer", "post"]


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
    given = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body)), **headers}
    scope: Scope = {
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
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    answered: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # the client stays

    async def send(message: Message) -> None:
        answered.append(message)

    await app(scope, receive, send)
    start, *parts = answered
    pairs = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"])
    return InnerAnswer(start["status"], dict(pairs), b"".join(part.get("body", b"") for part in parts))
