"""Read and write the rows of conversations and their items, within a transaction of the caller."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, func, insert, select, update

from tailrace.conversations.item_images import ItemImage
from tailrace.conversations.items import MAX_CHARACTERS, MAX_ITEMS, Conversation, Item, title_from
from tailrace.errors import RequestError, UnknownConversation
from tailrace.records.database_tables import conversation_items, conversations

__all__ = [
    "as_json",
    "find",
    "follow",
    "lock",
    "path_to",
    "read_item",
    "read_items",
    "refresh",
    "require_room",
    "write",
]

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_AT_ONCE = 500  # items per statement
_read_images = msgspec.json.Decoder(tuple[ItemImage, ...]).decode


def find(connection: Connection, owner: str, conversation_id: str) -> Conversation:
    """Raises: UnknownConversation if this owner has no such conversation."""
    if _ID.fullmatch(conversation_id):
        query = select(conversations).where(
            conversations.c.conversation_id == conversation_id, conversations.c.owner == owner
        )
        if (row := connection.execute(query).one_or_none()) is not None:
            return conversation_of(row)
    raise UnknownConversation("There is no conversation with this id.", param="conversation")


def lock(connection: Connection, owner: str, conversation_id: str, *, is_change: bool = True) -> Conversation:
    """Lock a conversation against other writers, as the first statement of a transaction. With `is_change` it becomes
    the last changed one. Raises: UnknownConversation."""
    if _ID.fullmatch(conversation_id):
        connection.execute(
            update(conversations)
            .where(conversations.c.conversation_id == conversation_id, conversations.c.owner == owner)
            .values(updated_s=time.time() if is_change else conversations.c.updated_s)
        )
    return find(connection, owner, conversation_id)


def conversation_of(row: Any) -> Conversation:  # Any: a row of `conversations`
    values = {name: getattr(row, name) for name in Conversation.__struct_fields__}
    return Conversation(**{**values, "metadata": msgspec.json.decode(row.metadata, type=dict[str, str])})


def as_json(metadata: Mapping[str, str]) -> str:
    return msgspec.json.encode(metadata).decode()


def read_items(connection: Connection, conversation_id: str, ids: Sequence[str] | None = None) -> list[Item]:
    """Return the items with these ids, or all, in order of creation."""
    columns = [conversation_items.c[name] for name in Item.__struct_fields__]
    query = select(*columns).where(conversation_items.c.conversation_id == conversation_id)
    if ids is not None:
        query = query.where(conversation_items.c.item_id.in_(ids))
    rows = connection.execute(query.order_by(conversation_items.c.number))
    return [Item(**{**row._mapping, "images": _read_images(row.images)}) for row in rows]


def read_item(connection: Connection, conversation_id: str, item_id: str, *, param: str = "item_id") -> Item:
    """Raises: UnknownConversation."""
    found = read_items(connection, conversation_id, [item_id]) if _ID.fullmatch(item_id) else []
    if not found:
        raise UnknownConversation("The conversation has no item with this id.", param=param)
    return found[0]


def path_to(connection: Connection, conversation_id: str, item_id: str | None) -> list[str]:
    """Return the ids of the items from the root to an item, including it."""
    query = select(conversation_items.c.item_id, conversation_items.c.parent_id).where(
        conversation_items.c.conversation_id == conversation_id
    )
    parents = {row.item_id: row.parent_id for row in connection.execute(query)}
    path: list[str] = []
    while item_id is not None:
        path.append(item_id)
        item_id = parents[item_id]
    return path[::-1]


def write(connection: Connection, conversation_id: str, items: Sequence[Item]) -> None:
    """Add items after all existing ones."""
    last = select(func.max(conversation_items.c.number)).where(conversation_items.c.conversation_id == conversation_id)
    number = connection.execute(last).scalar()
    first = 0 if number is None else number + 1
    rows = [
        {
            **msgspec.structs.asdict(item),
            "images": msgspec.json.encode(item.images).decode(),
            "conversation_id": conversation_id,
            "number": first + index,
        }
        for index, item in enumerate(items)
    ]
    for start in range(0, len(rows), _AT_ONCE):
        connection.execute(insert(conversation_items), rows[start : start + _AT_ONCE])


def follow(connection: Connection, conversation_id: str, item_id: str, parent_id: str | None) -> None:
    """Move the children of an item to another parent."""
    connection.execute(
        update(conversation_items)
        .where(conversation_items.c.conversation_id == conversation_id, conversation_items.c.parent_id == item_id)
        .values(parent_id=parent_id)
    )


def refresh(
    connection: Connection, owner: str, before: Conversation, *, head: str | None, came: Sequence[Item] = ()
) -> Conversation:
    """Update a conversation's counts and head, and give it a title from the new items if it has none. Returns the
    conversation."""
    of_it = conversation_items.c.conversation_id == before.conversation_id
    length = func.length(conversation_items.c.text) + func.length(conversation_items.c.reasoning)
    counts = select(func.count(), func.coalesce(func.sum(length), 0)).where(of_it)
    num_items, num_characters = connection.execute(counts).one()
    connection.execute(
        update(conversations)
        .where(conversations.c.conversation_id == before.conversation_id)
        .values(
            head=head,
            num_items=num_items,
            num_characters=num_characters,
            title=before.title or title_from(came),
        )
    )
    return find(connection, owner, before.conversation_id)


def require_room(conversation: Conversation) -> None:
    """Raises: RequestError if the conversation is larger than allowed."""
    if conversation.num_items > MAX_ITEMS:
        raise RequestError(f"A conversation has at most {MAX_ITEMS} items. Start a new conversation.", param="items")
    if conversation.num_characters > MAX_CHARACTERS:
        text = f"The texts of a conversation have at most {MAX_CHARACTERS} characters together. Start a new one."
        raise RequestError(text, param="items")
