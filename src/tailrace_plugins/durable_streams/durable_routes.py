"""The Durable Streams protocol at `/v1/durable/{path}`.

Clients create streams at any path, except `/v1/durable/streams/{id}`, where the streams of tokens are, read-only.
Clients choose the content and the media type of a stream, so headers forbid browsers to run scripts in it.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from functools import partial
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tailrace.errors import MethodNotAllowed, SeqOutOfRange, TailraceError
from tailrace.server import STREAM_HEADERS, Options, Server, owner_of, principal_of, read_query, require_plain_utf8
from tailrace_plugins.durable_streams.durable_answers import (
    etag_of,
    lifetime_headers,
    next_cursor,
    page_headers,
    receipt_headers,
    refusal,
    sse_headers,
)
from tailrace_plugins.durable_streams.durable_live import PAGE_BYTES, LongPoll, Tail, WholePage
from tailrace_plugins.durable_streams.durable_requests import (
    ROOT,
    Reading,
    key_of,
    owned_key,
    parse_batch,
    parse_creation,
    parse_reading,
    token_stream_id,
)
from tailrace_plugins.durable_streams.durable_store import DurableStore
from tailrace_plugins.durable_streams.durable_stream import DurableStream, is_json
from tailrace_plugins.durable_streams.durable_streams import DurableStreams
from tailrace_plugins.durable_streams.operations import Creation
from tailrace_plugins.durable_streams.page import Page, Readable, asked_position, page_of, position_of
from tailrace_plugins.durable_streams.token_streams import DurableTokenStream

__all__ = ["DurableRoutes"]

_JITTER = 180  # intervals of cursors, which is an hour
_HEADERS = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; sandbox",
    "cross-origin-resource-policy": "same-origin",
}
_NO_STORE = {"cache-control": "no-store"}
_METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS")
_READ_METHODS = ("GET", "HEAD", "OPTIONS")


class DurableRoutes:
    """The routes of both kinds of streams."""

    def __init__(self, durable: DurableStreams, server: Server, options: Options) -> None:
        self._durable = durable
        self._server = server
        self._tokens = server.streams
        self._bodies = server.bodies
        self._options = options

    def table(self) -> list[Route]:
        return [Route(ROOT + "{path:path}", _Endpoint(self), methods=list(_METHODS))]

    async def answer(self, request: Request) -> ASGIApp:
        """Raises: TailraceError."""
        path = str(request.path_params["path"])
        principal = principal_of(request.scope)
        principal.require("read" if request.method in _READ_METHODS else "generate")
        owner = principal.owner
        key = owned_key(owner, key_of(path))
        if (stream_id := token_stream_id(path)) is not None:
            if request.method not in _READ_METHODS:
                return _refuse_method()
            return await self._read(request, await self._token_stream(request, owner, stream_id))
        match request.method:
            case "PUT":
                return await self._create(request, key)
            case "POST":
                return await self._append(request, key)
            case "DELETE":
                await self._durable.perform(lambda store: store.delete(key))
                return Response(status_code=204, headers=_HEADERS)
            case "OPTIONS":
                return Response(status_code=204, headers=_HEADERS | {"allow": ", ".join(_METHODS)})
            case "HEAD":
                return await self._read(request, await self._durable.find(key))
            case _:
                return await self._read(request, await self._durable.use(key))

    async def _token_stream(self, request: Request, owner: str, stream_id: str) -> DurableTokenStream:
        after = asked_position(request.query_params.get("offset"))
        try:
            return DurableTokenStream(await self._tokens.find(owner, stream_id, after))
        except SeqOutOfRange:
            raise SeqOutOfRange("This is not an offset of this stream.", param="offset") from None

    async def _create(self, request: Request, key: bytes) -> ASGIApp:
        _require_plain(request)
        creation = parse_creation(request.headers)
        if creation.source is not None:
            creation = replace(creation, source=owned_key(owner_of(request.scope), creation.source))
        with self._bodies.reader(request.scope) as reader:
            body = await reader.read(request.headers, request.receive)
            page, is_new = await self._durable.perform(partial(_create, key, creation, body))
        headers = _HEADERS | page_headers(page)
        if is_new:
            path = self._server.settings.root_path + quote(request.url.path)
            headers["location"] = f"{request.url.scheme}://{request.headers['host']}{path}"
        return Response(status_code=201 if is_new else 200, headers=headers)

    async def _append(self, request: Request, key: bytes) -> ASGIApp:
        _require_plain(request)
        with self._bodies.reader(request.scope) as reader:
            body = await reader.read(request.headers, request.receive)
            batch = parse_batch(request.headers, body)
            receipt = await self._durable.perform(lambda store: store.append(key, batch))
        is_new = receipt.outcome == "appended" and receipt.stamp is not None
        return Response(status_code=200 if is_new else 204, headers=_HEADERS | receipt_headers(receipt))

    async def _read(self, request: Request, stream: Readable) -> ASGIApp:
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=_HEADERS | {"allow": ", ".join(_READ_METHODS)})
        if request.method == "HEAD":
            lifetime = lifetime_headers(stream.created) if isinstance(stream, DurableStream) else {}
            headers = page_headers(page_of(stream, stream.tail, 0))
            del headers["stream-up-to-date"]
            return Response(headers=_HEADERS | _NO_STORE | lifetime | headers)
        reading = parse_reading(read_query(request.scope["query_string"]))
        position = _position(stream, reading.offset)
        if reading.live is None:
            return _catch_up(request, stream, position, is_now=reading.offset == "now")
        return self._follow(stream, position, reading)

    def _follow(self, stream: Readable, position: int, reading: Reading) -> ASGIApp:
        def cursor() -> int:
            return next_cursor(reading.cursor, time.time(), random.randint(1, _JITTER))

        if reading.live == "sse":
            headers = _HEADERS | STREAM_HEADERS | sse_headers(stream.content_type)
            return Tail(stream, position, cursor, headers, heartbeat_s=self._server.settings.heartbeat_s)

        def answer(page: Page) -> ASGIApp:
            headers = _HEADERS | _NO_STORE | page_headers(page, cursor())
            if page.pieces:
                return WholePage(page, headers | {"etag": etag_of(page)})
            return Response(status_code=204, headers=headers)

        return LongPoll(stream, position, answer, wait_s=self._options["durable_poll_s"])


def _create(key: bytes, creation: Creation, body: bytes, store: DurableStore) -> tuple[Page, bool]:
    """Return the end of the stream, and whether it is new."""
    stream, is_new = store.create(key, creation, body)
    return page_of(stream, stream.tail, 0), is_new


def _require_plain(request: Request) -> None:
    """Raises: UnsupportedMediaType for a compressed body, or for JSON that is not in UTF-8."""
    other_headers = {"content-encoding": request.headers.get("content-encoding", "identity")}
    require_plain_utf8(request.headers if is_json(request.headers.get("content-type", "")) else other_headers)


def _position(stream: Readable, offset: str | None) -> int:
    if offset == "now":
        return stream.tail
    return 0 if offset in (None, "-1") else position_of(stream, offset or "")


def _catch_up(request: Request, stream: Readable, position: int, *, is_now: bool) -> ASGIApp:
    page = page_of(stream, position, PAGE_BYTES)
    headers = _HEADERS | page_headers(page)
    if is_now:
        return WholePage(page, headers | _NO_STORE)
    etag = etag_of(page)
    headers |= {"etag": etag, "cache-control": "private, no-cache"}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return WholePage(page, headers)


def _refuse_method() -> Response:
    answer = _refuse(MethodNotAllowed("Only the model writes streams of tokens."))
    answer.headers["allow"] = ", ".join(_READ_METHODS)
    return answer


def _refuse(error: TailraceError) -> Response:
    status, headers, body = refusal(error)
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if status in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not read
    return Response(body, status, _HEADERS | _NO_STORE | headers)


class _Endpoint:
    """The routes as an ASGI application. Errors are answered here, because the protocol requires its own headers."""

    def __init__(self, routes: DurableRoutes) -> None:
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._routes.answer(Request(scope, receive))
            await answer(scope, receive, send)
        except TailraceError as error:
            await _refuse(error)(scope, receive, send)
