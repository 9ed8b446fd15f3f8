"""tailrace's own export format. It has all branches and loses nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec.structs import asdict, replace

from tailrace.conversations.drafts import Draft, Json, as_shape, clean, draft_of, seconds
from tailrace.conversations.item_images import ItemImage
from tailrace.conversations.items import Conversation, Item, metadata_fault
from tailrace.errors import RequestError
from tailrace.images.reader import MAX_IMAGES
from tailrace.types import KeptImage

__all__ = ["FORMAT", "read_own", "write_own"]

FORMAT = "tailrace.conversations"
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_SHOWN = {"item_id": "id", "kind": "type", "created_s": "created_at"}
# What the page keeps in the metadata of a conversation, and a file must not set: tools to use, and a response.
_NOT_READ = ("tools", "mcp_response")
_HIDDEN = ("stream_id", "images")  # the stream means nothing to another server


class _OwnImage(msgspec.Struct):
    at: int
    id: str  # in the images of the file


class _OwnItem(msgspec.Struct):
    id: str
    parent_id: str | None = None
    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["", "system", "developer", "user", "assistant"] = ""
    text: str = ""
    reasoning: str = ""
    call_id: str = ""
    name: str = ""
    status: Literal["completed", "incomplete", "in_progress"] = "completed"
    created_at: float = 0.0
    images: list[_OwnImage] = []


class _OwnConversation(msgspec.Struct):
    items: list[_OwnItem]
    title: str = ""
    metadata: dict[str, str] = {}
    head: str | None = None
    created_at: float = 0.0
    updated_at: float = 0.0


def write_own(conversation: Conversation, items: Sequence[Item]) -> Json:
    return {
        "title": conversation.title,
        "created_at": conversation.created_s,
        "updated_at": conversation.updated_s,
        "metadata": conversation.metadata,
        "head": conversation.head,
        "items": [_written(item) for item in items],
    }


def _written(item: Item) -> Json:
    fields = {_SHOWN.get(name, name): value for name, value in asdict(item).items() if name not in _HIDDEN}
    images = [{"at": one.at, "id": one.kept.digest} for one in item.images if one.kept is not None]
    return fields | ({"images": images} if images else {})


def read_own(value: object, where: str) -> Draft:
    """Raises: RequestError."""
    given = as_shape(value, _OwnConversation, where)
    if fault := metadata_fault(given.metadata):
        raise RequestError(f"{where}.metadata: {fault}", param=f"{where}.metadata")
    seen: set[str] = set()
    items = []
    for index, one in enumerate(given.items):
        here = f"{where}.items[{index}]"
        if not _ID.fullmatch(one.id) or one.id in seen:
            raise RequestError(f"{here}: an id must be unique, and have 1 to 64 letters, digits, - and _.", param=here)
        if one.parent_id is not None and one.parent_id not in seen:
            raise RequestError(f"{here}: the parent must come before the item.", param=here)
        if (one.type == "message") != bool(one.role):
            raise RequestError(f"{here}: a message needs a role; other items must not have one.", param=here)
        if len(one.images) > MAX_IMAGES:
            raise RequestError(f"{here}.images: a message has at most {MAX_IMAGES} images.", param=here)
        positions = [image.at for image in one.images]
        if positions != sorted(positions) or any(not 0 <= at <= len(one.text) for at in positions):
            raise RequestError(f"{here}.images: their positions must be in the text, and in order.", param=here)
        if positions and one.role != "user":
            raise RequestError(f"{here}.images: only a message of a user can have images.", param=here)
        seen.add(one.id)
        items.append(_item(one))
    if given.head is not None and given.head not in seen:
        raise RequestError(f"{where}.head: there is no such item.", param=f"{where}.head")
    return draft_of(
        items,
        given.head,
        title=given.title,
        created_s=given.created_at,
        updated_s=given.updated_at,
        metadata={name: text for name, text in given.metadata.items() if name not in _NOT_READ},
    )


def _item(one: _OwnItem) -> Item:
    item = Item(
        item_id=one.id,
        parent_id=one.parent_id,
        kind=one.type,
        role=one.role,
        text=clean(one.text),
        reasoning=clean(one.reasoning),
        call_id=clean(one.call_id),
        name=clean(one.name),
        status=one.status,
        created_s=seconds(one.created_at),
        images=tuple(ItemImage(image.at, KeptImage(image.id, "", 0)) for image in one.images),
    )
    return replace(item, status="incomplete") if item.status == "in_progress" else item
