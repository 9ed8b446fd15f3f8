"""Links that show a conversation or a stream: an owner makes, lists and revokes them at `/v1/shares`; whoever has one
reads at `/v1/shared` (`shared_answer.py`), on the page `/share`.

The link has its secret behind a `#`, which browsers send to no server: so it is in no log of a proxy. The page sends it
in the header `X-Tailrace-Share`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from tailrace.access.audit import noting
from tailrace.access.principal import principal_of
from tailrace.access.shares import Share, ShareKind, new_share, token_of
from tailrace.api.openapi import RouteRow, described
from tailrace.api.request_headers import ignored_header
from tailrace.api.routes import route
from tailrace.dialects.bodies import JsonBody, read_json, require_json, require_plain_utf8, to_json
from tailrace.dialects.shapes import read_fields
from tailrace.errors import QueueFull, RequestError, UnknownShare
from tailrace.http.asgi_answers import JsonAnswer
from tailrace.records.records_service import Records
from tailrace.server import Server
from tailrace.transport.addresses import is_loopback, network_of
from tailrace_outer.conversations.conversation_routes import query_of, reader_of, writer_of
from tailrace_outer.conversations.shared_answer import SharedAnswer

__all__ = ["SHARE_PATHS", "ShareRoutes"]

_HEADER = "x-tailrace-share"
_USUAL_S = 7 * 86_400.0
_LONGEST_S = 366 * 86_400.0
_MOST_READERS = 200  # of all links on one server
_MOST_READERS_OF_LINK = 50
_MOST_OPENED = 120  # within a minute, from one network: of one link, and of links that are not valid
_MOST_OPENED_OF_LINK = 600  # within a minute, from anywhere
_MINUTE_S = 60.0


class NewShareBody(msgspec.Struct):
    conversation_id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | None = None
    stream_id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | None = None
    expires_in_s: Annotated[float, msgspec.Meta(ge=1, le=_LONGEST_S)] = _USUAL_S


class ShareRoutes:
    """To make and revoke a link needs the scopes `read` and `generate`; to read one needs only the link."""

    def __init__(self, server: Server, records: Records) -> None:
        self._server = server
        self._records = records
        self._opened: Counter[str] = Counter()  # by link, network or both, in the current minute
        self._minute = 0

    def table(self) -> list[Route]:
        return [
            route("GET", "/v1/shares", self._list),
            route("POST", "/v1/shares", self._create),
            route("DELETE", "/v1/shares/{share_id}", self._revoke),
            route("GET", "/v1/shared", self._read),
        ]

    async def _create(self, request: Request) -> ASGIApp:
        reader_of(request)
        owner = writer_of(request)
        require_plain_utf8(request.headers)
        require_json(request.headers)
        with self._server.bodies.reader(request.scope) as reader:
            text = await reader.read_json(request.headers, request.receive)
            body, ignored = read_fields(read_json(text), NewShareBody)
        headers = ignored_header(ignored, is_strict=self._server.settings.strict)
        kind, target = await self._target(owner, body)
        now_s = time.time()
        key_id = principal_of(request.scope).key_id
        share = new_share(owner, key_id, kind, target, now_s=now_s, expires_s=now_s + body.expires_in_s)
        with noting("share.create", request.scope, share=share.share_id, kind=kind, target=target):
            await self._records.ask(self._records.links, lambda links: links.add(share))
        await self._records.apply_own_change()
        return JsonAnswer(to_json(self._json(share)), 201, headers)

    async def _target(self, owner: str, body: NewShareBody) -> tuple[ShareKind, str]:
        """Return what a link shows. Raises: RequestError, UnknownConversation, StreamError: it must be the owner's."""
        if (body.conversation_id is None) == (body.stream_id is None):
            raise RequestError("Give either conversation_id or stream_id.", param="conversation_id")
        if body.conversation_id is not None:
            conversation_id = body.conversation_id
            await self._records.conversations.ask(lambda store: store.get(owner, conversation_id))
            return "conversation", conversation_id
        assert body.stream_id is not None
        if body.stream_id.startswith("resp_mcp_"):  # of a plugin
            text = "A link shows one stream. A response with MCP tools has several: share its conversation."
            raise RequestError(text, param="stream_id")
        stream_id = body.stream_id.removeprefix("resp_")
        await self._server.streams.find(owner, stream_id)
        return "stream", stream_id

    async def _list(self, request: Request) -> ASGIApp:
        reader_of(request)
        owner = writer_of(request)  # the links are secrets
        query_of(request)
        found = await self._records.ask(self._records.links, lambda links: links.list(owner))
        return JsonAnswer(to_json({"object": "list", "data": [self._json(share) for share in found]}))

    async def _revoke(self, request: Request) -> ASGIApp:
        owner, share_id = writer_of(request), request.path_params["share_id"]
        with noting("share.revoke", request.scope, share=share_id[:16]):
            await self._records.ask(self._records.links, lambda links: links.revoke(owner, share_id))
        self._records.shares.end(share_id)
        return JsonAnswer(to_json({"id": share_id, "object": "share.revoked", "revoked": True}))

    async def _read(self, request: Request) -> ASGIApp:
        share = self._records.shares.find(request.headers.get(_HEADER, ""), time.time())
        self._count(request, share)
        if share is None:
            raise UnknownShare("This link is not valid any more.", param=_HEADER)
        shares = self._records.shares
        if shares.num_readers >= _MOST_READERS or shares.num_readers_of(share) >= _MOST_READERS_OF_LINK:
            raise QueueFull("Too many people read this at the moment.", retry_after_s=10.0)
        return SharedAnswer(share, self._records, self._server.streams, self._server.settings.heartbeat_s)

    def _count(self, request: Request, share: Share | None) -> None:
        """Raises: QueueFull for too many openings of one link, or too many from one network. Behind a proxy all readers
        have one network: failed openings must not lock out those who have a link, and on this machine no network is a
        reader's own."""
        minute = int(asyncio.get_running_loop().time() / _MINUTE_S)
        if minute != self._minute:
            self._minute = minute
            self._opened.clear()
        network = network_of(request.client.host) if request.client is not None else ""
        limits = {network: _MOST_OPENED}
        if share is not None:
            limits = {} if is_loopback(network) else {f"{share.share_id} {network}": _MOST_OPENED}
            limits[share.share_id] = _MOST_OPENED_OF_LINK  # last: refused openings do not count for the others
        for counted, most in limits.items():
            self._opened[counted] += 1
            if self._opened[counted] > most:
                raise QueueFull("Too many requests for links.", retry_after_s=_MINUTE_S)

    def _json(self, share: Share) -> JsonBody:
        return {
            "id": share.share_id,
            "object": "share",
            f"{share.kind}_id": share.target,
            "path": f"{self._server.settings.root_path}/share#{token_of(share)}",
            "created_at": int(share.created_s),
            "expires_at": int(share.expires_s),
        }


SHARE_PATHS = described(
    (
        RouteRow("get", "/v1/shares", "list_shares", "Lists the links that show a conversation or a stream."),
        RouteRow("post", "/v1/shares", "create_share", "Makes a link that shows a conversation or a stream.", {
            "conversation_id": "conv_x", "expires_in_s": 3600,
        }),
        RouteRow("delete", "/v1/shares/{share_id}", "revoke_share", "Revokes a link, and sends its readers away."),
        RouteRow("get", "/v1/shared", "read_shared", "What the link in X-Tailrace-Share shows, as events."),
    )
)  # fmt: skip
