"""Export and import of conversations as files."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from tailrace.access.audit import note
from tailrace.access.principal import principal_of
from tailrace.api.routes import route
from tailrace.conversations.drafts import Draft
from tailrace.conversations.formats import ConversationFormat
from tailrace.conversations.items import Conversation, Item
from tailrace.dialects.bodies import read_value, require_json, require_plain_utf8, to_json
from tailrace.errors import RequestError, UnknownConversation
from tailrace.http.asgi_answers import JsonAnswer
from tailrace.http.body_budget import BodyBudget
from tailrace.records.conversation_keeper import ConversationKeeper
from tailrace.types import Image, KeptImage
from tailrace_outer.conversations.conversation_images import ImageIntake
from tailrace_outer.conversations.conversation_routes import conversation_json, query_of, reader_of, writer_of
from tailrace_outer.conversations.files import file_formats, read_file, read_images, with_images

__all__ = ["ConversationFileRoutes"]


class ConversationFileRoutes:
    """The routes of export files. Export needs the scope `read`, import needs `generate`."""

    def __init__(self, conversations: ConversationKeeper, bodies: BodyBudget, intake: ImageIntake) -> None:
        self._conversations = conversations
        self._formats = file_formats()
        self._bodies = bodies
        self._intake = intake

    def table(self) -> list[Route]:
        return [
            route("GET", "/v1/conversations/export", self._export_all),
            route("GET", "/v1/conversations/{conversation_id}/export", self._export_one),
            route("POST", "/v1/conversations/import", self._import),
        ]

    async def _export_all(self, request: Request) -> ASGIApp:
        owner, form = reader_of(request), self._format(request)
        ids = await self._conversations.ask(lambda store: store.ids(owner))
        note("conversation.export", "done", request.scope)
        return _file(self._pieces(owner, ids, form))

    async def _export_one(self, request: Request) -> ASGIApp:
        owner, form, conversation_id = reader_of(request), self._format(request), request.path_params["conversation_id"]
        await self._conversations.ask(lambda store: store.get(owner, conversation_id))  # 404 before the answer starts
        note("conversation.export", "done", request.scope, conversation=conversation_id)
        return _file(self._pieces(owner, [conversation_id], form))

    async def _import(self, request: Request) -> ASGIApp:
        owner, key_id = writer_of(request), principal_of(request.scope).key_id
        query_of(request)
        require_json(request.headers)
        require_plain_utf8(request.headers)
        with self._bodies.reader(request.scope, has_images=self._intake.is_wanted()) as reader:
            text = await reader.read_json(request.headers, request.receive)
            drafts, files = await asyncio.to_thread(lambda: _read(text))
            reader.check_text(sum(map(len, files.values())))
            async with self._intake.reading_file(request.scope, files) as images:
                found = {name: image for name, (image, _) in images.items()}
                given = [(draft.conversation, with_images(draft.items, found)) for draft in drafts]
                created = await self._conversations.ask(
                    lambda store: store.take_in(owner, given, images=dict(images.values()), key_id=key_id)
                )
        note("conversation.import", "done", request.scope, conversations=len(created))
        return JsonAnswer(to_json(_imported(created, drafts)))

    def _format(self, request: Request) -> ConversationFormat:
        """Raises: RequestError."""
        name = query_of(request, "format").get("format", "tailrace")
        if name not in self._formats:
            raise RequestError(f"format must be one of {', '.join(self._formats)}.", param="format")
        return self._formats[name]

    async def _pieces(self, owner: str, ids: Sequence[str], form: ConversationFormat) -> AsyncIterator[bytes]:
        """Yield the file, one conversation at a time, without those that are deleted meanwhile."""
        start, end = form.frame
        yield start
        comma = b""
        shown: dict[str, None] = {}  # the digests of all images, in order
        for conversation_id in ids:
            with contextlib.suppress(UnknownConversation):
                conversation, items = await self._conversations.ask(lambda store: store.tree(owner, conversation_id))  # noqa: B023
                yield comma + await asyncio.to_thread(_encoded, form, conversation, items)
                comma = b","
                shown |= dict.fromkeys(one.kept.digest for item in items for one in item.images if one.kept is not None)
        if shown and form.images is not None:
            yield form.images[0]
            comma = b""
            for digest in shown:
                with contextlib.suppress(RequestError):
                    (image,) = await self._conversations.find_images(owner, [_named(digest)])
                    yield comma + to_json({"id": digest, "content": base64.b64encode(image.content).decode()})
                    comma = b","
            end = form.images[1]
        yield end


def _read(text: bytes) -> tuple[list[Draft], dict[str, bytes]]:
    """Return the conversations of a file, and its images by their ids in it. Raises: RequestError."""
    value = read_value(text)
    return read_file(value), read_images(value)


def _encoded(form: ConversationFormat, conversation: Conversation, items: Sequence[Item]) -> bytes:
    return to_json(form.write(conversation, items))


def _named(digest: str) -> Image:
    return Image(b"", "images", kept=KeptImage(digest, "", 0))


def _file(pieces: AsyncIterator[bytes]) -> ASGIApp:
    headers = {"content-disposition": 'attachment; filename="conversations.json"', "cache-control": "no-store"}
    return StreamingResponse(pieces, headers=headers, media_type="application/json")


def _imported(created: Sequence[Conversation], drafts: Sequence[Draft]) -> dict[str, object]:
    return {
        "object": "list",
        "data": [conversation_json(one) for one in created],
        "num_left_out": sum(draft.num_left_out for draft in drafts),
    }
