"""Conversations out of the server as a file, and in from one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from tailrace.access.audit import note
from tailrace.access.principal import caller_of
from tailrace.api.conversations import conversation_json, query_of, reader_of, writer_of
from tailrace.api.routes import route
from tailrace.conversations.drafts import Draft
from tailrace.conversations.files import FORMS, FRAMES, read_file
from tailrace.conversations.items import Conversation, Item
from tailrace.dialects.bodies import read_value, require_json, require_plain_utf8, to_json
from tailrace.errors import RequestError, UnknownConversation
from tailrace.http.answers import JsonAnswer
from tailrace.http.bodies import BodyBudget
from tailrace.records.keeper import ConversationKeeper

__all__ = ["ConversationFileRoutes"]


class ConversationFileRoutes:
    """An export demands the scope `read`, an import `generate`."""

    def __init__(self, conversations: ConversationKeeper, bodies: BodyBudget) -> None:
        self._conversations = conversations
        self._bodies = bodies

    def table(self) -> list[Route]:
        return [
            route("GET", "/v1/conversations/export", self._export_all),
            route("GET", "/v1/conversations/{conversation_id}/export", self._export_one),
            route("POST", "/v1/conversations/import", self._import),
        ]

    async def _export_all(self, request: Request) -> ASGIApp:
        owner, form = reader_of(request), _form(request)
        ids = await self._conversations.ask(lambda store: store.ids(owner))
        note("conversation.export", "done", request.scope)
        return _file(self._pieces(owner, ids, form))

    async def _export_one(self, request: Request) -> ASGIApp:
        owner, form, its_id = reader_of(request), _form(request), request.path_params["conversation_id"]
        await self._conversations.ask(lambda store: store.get(owner, its_id))  # refused while it still can be
        note("conversation.export", "done", request.scope, conversation=its_id)
        return _file(self._pieces(owner, [its_id], form))

    async def _import(self, request: Request) -> ASGIApp:
        owner = writer_of(request)
        query_of(request)
        require_json(request.headers)
        require_plain_utf8(request.headers)
        with self._bodies.reader(caller_of(request.scope)) as reader:
            text = await reader.read(request.headers, request.receive)
            drafts = await asyncio.to_thread(lambda: read_file(read_value(text)))
        made = await self._conversations.ask(
            lambda store: store.take_in(owner, [(draft.conversation, draft.items) for draft in drafts])
        )
        note("conversation.import", "done", request.scope, conversations=len(made))
        return JsonAnswer(to_json(_imported(made, drafts)))

    async def _pieces(self, owner: str, ids: Sequence[str], form: str) -> AsyncIterator[bytes]:
        """The file, one conversation after the other; those that are deleted meanwhile are not in it."""
        before, behind = FRAMES[form]
        yield before
        comma = b""
        for its_id in ids:
            try:
                found = await self._conversations.ask(lambda store, its_id=its_id: store.tree(owner, its_id))  # type: ignore[misc]
            except UnknownConversation:
                continue
            yield comma + await asyncio.to_thread(_written, form, *found)
            comma = b","
        yield behind


def _written(form: str, conversation: Conversation, items: Sequence[Item]) -> bytes:
    return to_json(FORMS[form](conversation, items))


def _form(request: Request) -> str:
    """Raises: RequestError."""
    form = query_of(request, "format").get("format", "tailrace")
    if form not in FORMS:
        raise RequestError(f"format is one of {', '.join(FORMS)}.", param="format")
    return form


def _file(pieces: AsyncIterator[bytes]) -> ASGIApp:
    headers = {"content-disposition": 'attachment; filename="conversations.json"', "cache-control": "no-store"}
    return StreamingResponse(pieces, headers=headers, media_type="application/json")


def _imported(made: Sequence[Conversation], drafts: Sequence[Draft]) -> dict[str, object]:
    return {
        "object": "list",
        "data": [conversation_json(one) for one in made],
        "num_left_out": sum(draft.num_left_out for draft in drafts),
    }
