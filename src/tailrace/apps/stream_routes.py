"""Requests about streams, answered from their logs: those below `/v1/streams/`, and those with an event's id."""

from __future__ import annotations

from contextlib import nullcontext

from starlette.datastructures import Headers, QueryParams
from starlette.types import ASGIApp, Scope

from tailrace.access.audit import noting
from tailrace.access.principal import owner_of, principal_of
from tailrace.apps.streams import AppStreams
from tailrace.dialects.bodies import printable
from tailrace.errors import SeqOutOfRange
from tailrace.streams import is_stream_id, parse_cursor

__all__ = ["STREAMS_PATH", "event_id_of", "resumed", "stream_answer"]

STREAMS_PATH = "/v1/streams"
_AUDITED = {("POST", "cancel"): "stream.cancel", ("DELETE", ""): "stream.delete"}


async def stream_answer(streams: AppStreams, scope: Scope, path: str) -> ASGIApp | None:
    """Return the answer to a request below `/v1/streams/`; None if its path has no stream's id.

    Raises: StreamError, RequestError, StorageError.
    """
    stream_id, _, verb = path.removeprefix(STREAMS_PATH + "/").partition("/")
    if not path.startswith(STREAMS_PATH + "/") or not is_stream_id(stream_id):
        return None
    method, owner = scope["method"], owner_of(scope)
    if verb == "events" and method in ("GET", "HEAD"):
        principal_of(scope).require("read")
        query = QueryParams(scope["query_string"])
        ignored = [printable(name) for name in query if name != "after"]
        after = Headers(scope=scope).get("last-event-id") or query.get("after", "")
        return await streams.resume(owner, after, stream_id, ignored=ignored)
    event = _AUDITED.get((method, verb))
    with noting(event, scope, stream=stream_id) if event else nullcontext():
        principal_of(scope).require("read" if method in ("GET", "HEAD") else "generate")
        return await streams.on_stream(owner, method, stream_id, verb)


def event_id_of(scope: Scope) -> str:
    """Return the event's id that a request has in `Last-Event-ID`, or "". Apps may have event ids of their own."""
    cursor = Headers(scope=scope).get("last-event-id", "")
    try:
        stream_id, _ = parse_cursor(cursor)
    except SeqOutOfRange:
        return ""
    return cursor if is_stream_id(stream_id) else ""


async def resumed(streams: AppStreams, scope: Scope, app: str) -> ASGIApp:
    """Return the rest of a stream of this app, for a request with an event's id. Raises: StreamError, StorageError."""
    principal_of(scope).require("read")
    return await streams.resume(owner_of(scope), event_id_of(scope), app=app)
