"""Requests about streams, answered from their logs: those below `/v1/streams/`, and those with an event's id."""

from __future__ import annotations

from starlette.datastructures import Headers, QueryParams
from starlette.types import ASGIApp, Scope

from tailrace.access.principal import owner_of, principal_of
from tailrace.dialects.bodies import printable
from tailrace.errors import MethodNotAllowed, SeqOutOfRange
from tailrace.http.asgi_answers import WithHeaders
from tailrace.types import is_stream_id, parse_cursor
from tailrace_outer.apps.app_streams import AppStreams
from tailrace_outer.apps.events import EmptyEncoder, encoder_of

__all__ = ["STREAMS_PATH", "event_id_of", "resumed", "stream_answer"]

STREAMS_PATH = "/v1/streams"


async def stream_answer(streams: AppStreams, scope: Scope, path: str) -> ASGIApp | None:
    """Return the answer to a request below `/v1/streams/`; None if its path has no stream's id.

    Raises: StreamError, RequestError, StorageError.
    """
    stream_id, _, verb = path.removeprefix(STREAMS_PATH + "/").partition("/")
    if not path.startswith(STREAMS_PATH + "/") or not is_stream_id(stream_id):
        return None
    method = scope["method"]
    if verb == "events" and method in ("GET", "HEAD"):
        principal_of(scope).require("read")
        query = QueryParams(scope["query_string"])
        ignored = [printable(name) for name in query if name != "after"]
        after = Headers(scope=scope).get("last-event-id") or query.get("after", "")
        answer = await streams.resume(owner_of(scope), after, stream_id)
        return WithHeaders(answer, {"x-tailrace-ignored": ", ".join(ignored)}) if ignored else answer
    principal_of(scope).require("read" if method in ("GET", "HEAD") else "generate")
    match method, verb:
        case ("GET" | "HEAD", ""):
            return await streams.actions.act(scope, stream_id, "show", encoder_of)
        case ("POST", "cancel"):
            return await streams.actions.act(scope, stream_id, "cancel", encoder_of)
        case ("DELETE", ""):
            return await streams.actions.act(scope, stream_id, "delete", EmptyEncoder)
    await streams.actions.find(owner_of(scope), stream_id)
    raise MethodNotAllowed("This method is not allowed here.")


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
