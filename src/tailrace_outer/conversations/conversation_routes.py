"""Conversations over HTTP, as in OpenAI's Conversations API. Lists of conversations, titles, search and branches are
additions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, UnsetType, structs
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from tailrace.access.audit import note
from tailrace.access.principal import owner_of, principal_of
from tailrace.api.request_headers import ignored_header
from tailrace.api.routes import route
from tailrace.conversations.items import MAX_TITLE, Conversation, Item, ItemId, check_items, without_marks
from tailrace.dialects.bodies import JsonBody, read_json, require_json, require_plain_utf8, to_json
from tailrace.dialects.queries import read_count, read_query
from tailrace.dialects.shapes import T, read_fields
from tailrace.errors import RequestError
from tailrace.http.asgi_answers import JsonAnswer
from tailrace.http.body_budget import BodyReader
from tailrace.records.conversation_keeper import ConversationKeeper
from tailrace.server import Server
from tailrace.types import Image, KeptImage
from tailrace_outer.conversations.conversation_images import ImageIntake
from tailrace_outer.responses.responses_items import InputItem, item_json, items_from

__all__ = ["ConversationRoutes", "conversation_json", "query_of", "reader_of", "writer_of"]

_Result = TypeVar("_Result")
_Shown = TypeVar("_Shown", Conversation, Item)
_MAX_PAGE = 100
_PAGE = 20
_MAX_SEARCH = 200
_SEARCHES_AT_ONCE = 2  # a search reads all texts of an owner; the other threads serve everybody else

_Title = Annotated[str, msgspec.Meta(max_length=MAX_TITLE)]
_Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(min_length=1, max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]


class NewConversationBody(msgspec.Struct):
    items: list[InputItem] | None = None
    metadata: _Metadata | None = None
    title: _Title | None = None


class ConversationChangesBody(msgspec.Struct):
    metadata: _Metadata | None = None
    title: _Title | None = None
    head: ItemId | UnsetType | None = UNSET


class NewItemsBody(msgspec.Struct):
    items: list[InputItem]
    parent_id: ItemId | UnsetType | None = UNSET


class ConversationRoutes:
    """The routes of conversations. Reading needs the scope `read`, writing needs `generate`."""

    def __init__(self, server: Server, conversations: ConversationKeeper, intake: ImageIntake) -> None:
        self._server = server
        self._conversations = conversations
        self._bodies = server.bodies
        self._intake = intake
        self._searching = asyncio.Semaphore(_SEARCHES_AT_ONCE)

    def table(self) -> list[Route]:
        one = "/v1/conversations/{conversation_id}"
        return [
            route("GET", "/v1/conversations", self._list),
            route("POST", "/v1/conversations", self._create),
            route("GET", one, self._show),
            route("POST", one, self._update),
            route("DELETE", one, self._delete),
            route("GET", one + "/tree", self._tree),
            route("GET", one + "/items", self._list_items),
            route("POST", one + "/items", self._add_items),
            route("GET", one + "/items/{item_id}", self._show_item),
            route("DELETE", one + "/items/{item_id}", self._delete_item),
        ]

    async def _list(self, request: Request) -> ASGIApp:
        owner = reader_of(request)
        query = query_of(request, "limit", "after", "search")
        limit, after, search = _limit(query), query.get("after"), query.get("search", "")
        if len(search) > _MAX_SEARCH or "\0" in search:
            raise RequestError(f"search must have at most {_MAX_SEARCH} characters, and no NUL.", param="search")
        async with self._searching if search else contextlib.nullcontext():
            page = await self._conversations.ask(
                lambda store: store.page(owner, limit=limit, after=after, search=search)
            )
        return _page(*page, conversation_json, lambda found: found.conversation_id)

    async def _create(self, request: Request) -> ASGIApp:
        owner = writer_of(request)
        key_id = principal_of(request.scope).key_id
        async with (
            self._read(request, NewConversationBody) as (body, ignored, reader),
            self._reading(request, reader, body.items or []) as (items, left_out, images),
        ):
            title, headers = (
                _title(body.title) or "",
                ignored_header((*ignored, *left_out), is_strict=self._server.settings.strict),
            )
            created = await self._conversations.ask(
                lambda store: store.create(
                    owner, title=title, metadata=body.metadata, items=items, images=images, key_id=key_id
                )
            )
        return _answer(conversation_json(created), headers)

    async def _show(self, request: Request) -> ASGIApp:
        owner, conversation_id = reader_of(request), request.path_params["conversation_id"]
        conversation = await self._conversations.ask(lambda store: store.get(owner, conversation_id))
        return _answer(conversation_json(conversation))

    async def _update(self, request: Request) -> ASGIApp:
        owner, conversation_id = writer_of(request), request.path_params["conversation_id"]
        async with self._read(request, ConversationChangesBody) as (body, ignored, reader):
            reader.check_text(0)
        title, headers = _title(body.title), ignored_header(ignored, is_strict=self._server.settings.strict)
        changed = await self._conversations.ask(
            lambda store: store.update(owner, conversation_id, title=title, metadata=body.metadata, head=body.head)
        )
        return _answer(conversation_json(changed), headers)

    async def _delete(self, request: Request) -> ASGIApp:
        owner, conversation_id = writer_of(request), request.path_params["conversation_id"]
        await self._conversations.ask(lambda store: store.delete(owner, conversation_id))
        note("conversation.delete", "done", request.scope, conversation=conversation_id)
        return _answer({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def _tree(self, request: Request) -> ASGIApp:
        owner, conversation_id = reader_of(request), request.path_params["conversation_id"]
        (conversation, items), answers = await self._conversations.ask(
            lambda store: (store.tree(owner, conversation_id), store.answers(owner, conversation_id))
        )
        return _answer(
            {
                "object": "conversation.tree",
                "conversation_id": conversation_id,
                "head": conversation.head,
                "data": [item_json(item) for item in items],
                "answers": {stream_id: structs.asdict(facts) for stream_id, facts in answers.items()},
            }
        )

    async def _list_items(self, request: Request) -> ASGIApp:
        owner, conversation_id = reader_of(request), request.path_params["conversation_id"]
        query = query_of(request, "limit", "after", "order", "include", "include[]")
        limit, after, order = _limit(query), query.get("after"), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError("order must be asc or desc.", param="order")
        page = await self._conversations.ask(
            lambda store: store.items(owner, conversation_id, limit=limit, after=after, is_descending=order == "desc")
        )
        return _page(*page, item_json, lambda item: item.item_id)

    async def _add_items(self, request: Request) -> ASGIApp:
        owner, conversation_id = writer_of(request), request.path_params["conversation_id"]
        async with (
            self._read(request, NewItemsBody) as (body, ignored, reader),
            self._reading(request, reader, body.items) as (items, left_out, images),
        ):
            headers = ignored_header((*ignored, *left_out), is_strict=self._server.settings.strict)
            if not items:
                raise RequestError("items must not be empty.", param="items")
            added = await self._conversations.ask(
                lambda store: store.add(owner, conversation_id, items, body.parent_id, images=images)
            )
        return _page(added, False, item_json, lambda item: item.item_id, headers)

    async def _show_item(self, request: Request) -> ASGIApp:
        owner, path = reader_of(request), request.path_params
        item = await self._conversations.ask(lambda store: store.item(owner, path["conversation_id"], path["item_id"]))
        return _answer(item_json(item))

    async def _delete_item(self, request: Request) -> ASGIApp:
        owner, path = writer_of(request), request.path_params
        changed = await self._conversations.ask(
            lambda store: store.delete_item(owner, path["conversation_id"], path["item_id"])
        )
        return _answer(conversation_json(changed))

    @contextlib.asynccontextmanager
    async def _reading(
        self, request: Request, reader: BodyReader, given: list[InputItem]
    ) -> AsyncIterator[tuple[list[Item], list[str], Mapping[KeptImage, bytes]]]:
        """Read items: they, what is left out, and their images. Raises: RequestError; BodyTooLarge for too much text
        beside the images; as `ImageIntake.reading`."""
        notes: list[str] = []
        images: list[Image] = []
        items = [without_marks(item) for item in items_from(given, notes, name="items", images=images)]
        reader.check_text(sum(len(image.content) for image in images))
        check_items(items)
        async with self._intake.reading(request.scope, images) as read:
            kept = (image for image, _ in read)
            items = [
                structs.replace(item, images=tuple(structs.replace(one, kept=next(kept)) for one in item.images))
                for item in items
            ]
            yield items, notes, dict(read)

    @contextlib.asynccontextmanager
    async def _read(self, request: Request, kind: type[T]) -> AsyncIterator[tuple[T, tuple[str, ...], BodyReader]]:
        """Read the body and the names of unknown fields. They are in memory until this context ends, with the reader.
        Raises: RequestError."""
        require_plain_utf8(request.headers)
        with self._bodies.reader(request.scope, has_images=self._intake.is_wanted()) as reader:
            text = await reader.read_json(request.headers, request.receive)
            if text:
                require_json(request.headers)
            yield *read_fields(read_json(text or b"{}"), kind), reader


def conversation_json(conversation: Conversation) -> JsonBody:
    return {
        "id": conversation.conversation_id,
        "object": "conversation",
        "created_at": int(conversation.created_s),
        "updated_at": int(conversation.updated_s),
        "metadata": conversation.metadata,
        "title": conversation.title,
        "head": conversation.head,
        "num_items": conversation.num_items,
    }


def reader_of(request: Request) -> str:
    """Return the owner. Raises: Forbidden without the scope `read`."""
    principal_of(request.scope).require("read")
    return owner_of(request.scope)


def writer_of(request: Request) -> str:
    """Return the owner. Raises: Forbidden without the scope `generate`."""
    principal_of(request.scope).require("generate")
    return owner_of(request.scope)


def query_of(request: Request, *known: str) -> Mapping[str, str]:
    """Raises: RequestError."""
    query = read_query(request.scope["query_string"])
    unknown = next((name for name in query if name not in known), None)
    if unknown is not None:
        allowed = f"Allowed are {', '.join(known)}." if known else "This path takes none."
        raise RequestError(f"The query has an unknown parameter. {allowed}")
    return query


def _limit(query: Mapping[str, str]) -> int:
    """Raises: RequestError."""
    limit = read_count(query, "limit") or _PAGE
    if limit > _MAX_PAGE:
        raise RequestError(f"limit must be at most {_MAX_PAGE}.", param="limit")
    return limit


def _title(given: str | None) -> str | None:
    """Raises: RequestError."""
    if given is not None and "\0" in given:
        raise RequestError("title must not have NUL characters.", param="title")
    return given


def _page(
    found: Sequence[_Shown],
    has_more: bool,
    show: Callable[[_Shown], JsonBody],
    id_of: Callable[[_Shown], str],
    headers: Mapping[str, str] | None = None,
) -> ASGIApp:
    return _answer(
        {
            "object": "list",
            "data": [show(one) for one in found],
            "first_id": id_of(found[0]) if found else None,
            "last_id": id_of(found[-1]) if found else None,
            "has_more": has_more,
        },
        headers,
    )


def _answer(body: JsonBody, headers: Mapping[str, str] | None = None) -> ASGIApp:
    return JsonAnswer(to_json(body), 200, headers)
