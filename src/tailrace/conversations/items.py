"""The items of a conversation, and how they become the messages of a prompt.

A conversation is a tree. Each item names its parent, and those that follow the same one are branches. The current
branch leads from an item without a parent to the conversation's `head`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from tailrace.errors import ConversationLocked, RequestError
from tailrace.types import Message, ToolCall

__all__ = [
    "ID_PREFIXES",
    "MAX_CHARACTERS",
    "MAX_ITEMS",
    "MAX_TITLE",
    "Branch",
    "Conversation",
    "Item",
    "ItemId",
    "ItemKind",
    "ItemStatus",
    "Place",
    "chained",
    "check_items",
    "items_of",
    "messages_of",
    "metadata_fault",
    "title_from",
]

MAX_ITEMS = 10_000  # of one conversation
MAX_CHARACTERS = 8_000_000  # of all its items
MAX_TITLE = 200
ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}
_FROM_TEXT = 80  # characters of a title that is made of a message

ItemKind: TypeAlias = Literal["message", "function_call", "function_call_output"]
ItemId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
ItemStatus: TypeAlias = Literal["completed", "incomplete", "in_progress"]


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A message, a call of a tool, or what a tool gave. `text` is what was said, the arguments of a call as JSON, or
    the tool's output."""

    item_id: str = ""  # "" until it has its place
    parent_id: str | None = None
    kind: ItemKind = "message"
    role: str = ""  # of a message
    text: str = ""
    call_id: str = ""  # of a call and its output
    name: str = ""  # of the function that is called
    status: ItemStatus = "completed"
    stream_id: str = ""  # of an answer: the stream that writes it, or wrote it
    created_s: float = 0.0  # since the epoch


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """All of a conversation but its items. Times are seconds since the epoch."""

    conversation_id: str = ""  # until it is kept
    title: str = ""
    created_s: float = 0.0
    updated_s: float = 0.0
    metadata: Mapping[str, str] = {}
    head: str | None = None  # the last item of the current branch
    num_items: int = 0
    num_characters: int = 0  # of all items' texts


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes on: behind the last of these items, which lead there from the beginning."""

    conversation_id: str
    items: tuple[Item, ...] = ()

    @property
    def parent_id(self) -> str | None:
        return self.items[-1].item_id if self.items else None

    def require_free(self) -> None:
        """Raises: ConversationLocked where the last item is an answer that is being written."""
        if self.items and self.items[-1].status == "in_progress":
            raise ConversationLocked(
                "An answer is being written there. Wait for it, cancel its stream, or name another parent_id.",
                param="conversation",
                retry_after_s=1.0,
            )

    def before_last(self) -> Branch:
        return msgspec.structs.replace(self, items=self.items[:-1])


class Place(msgspec.Struct, frozen=True):
    """A conversation, and the item that the input follows: without `parent_id` the current branch's last, with null
    none. Another one than the last makes a branch."""

    id: ItemId
    parent_id: ItemId | UnsetType | None = UNSET


def messages_of(items: Iterable[Item]) -> tuple[Message, ...]:
    """The messages of a prompt. Calls belong to what the assistant has said before them."""
    messages: list[Message] = []
    for are_calls, group in groupby(items, lambda item: item.kind == "function_call"):
        if are_calls:
            calls = tuple(ToolCall(item.call_id, item.name, item.text) for item in group)
            said = messages.pop().content if messages and messages[-1].role == "assistant" else ""
            messages.append(Message("assistant", said, calls))
            continue
        for item in group:
            if item.kind == "function_call_output":
                messages.append(Message("tool", item.text, tool_call_id=item.call_id))
            else:  # templates do not know the newer name of the same role
                messages.append(Message("system" if item.role == "developer" else item.role, item.text))
    return tuple(messages)


def items_of(messages: Iterable[Message]) -> tuple[Item, ...]:
    """The items that `messages_of` makes the same messages of."""
    items: list[Item] = []
    for message in messages:
        if message.role == "tool":
            items.append(Item(kind="function_call_output", text=message.content, call_id=message.tool_call_id))
            continue
        if message.content or not message.tool_calls:
            items.append(Item(role=message.role, text=message.content))
        items += (
            Item(kind="function_call", text=call.arguments, call_id=call.call_id, name=call.name)
            for call in message.tool_calls
        )
    return tuple(items)


def chained(items: Sequence[Item], ids: Iterable[str], parent_id: str | None, created_s: float) -> list[Item]:
    """The items with their ids, each behind the one before, the first behind `parent_id`."""
    placed: list[Item] = []
    for item, item_id in zip(items, ids, strict=False):
        placed.append(msgspec.structs.replace(item, item_id=item_id, parent_id=parent_id, created_s=created_s))
        parent_id = item_id
    return placed


def check_items(items: Iterable[Item]) -> None:
    """Raises: RequestError for what no database keeps, or no conversation has room for."""
    num_characters = 0
    for item in items:
        if any("\0" in text for text in (item.text, item.call_id, item.name)):
            raise RequestError("Texts of a conversation have no NUL characters.", param="items")
        num_characters += len(item.text) + len(item.call_id) + len(item.name)
    if num_characters > MAX_CHARACTERS:
        raise RequestError(f"The texts of a conversation have at most {MAX_CHARACTERS} characters.", param="items")


def title_from(items: Iterable[Item]) -> str:
    """A title for a conversation that has none: the beginning of the first thing that a user says in it."""
    said = next((item.text for item in items if item.role == "user" and item.text.strip()), "")
    line = re.sub(r"\s+", " ", said[: 10 * _FROM_TEXT]).strip()
    return line if len(line) <= _FROM_TEXT else line[: _FROM_TEXT - 1].rstrip() + "…"


def metadata_fault(given: Mapping[str, str]) -> str:
    """What is wrong with metadata; "" for nothing. The limits are those of OpenAI's API."""
    if len(given) > 16:
        return "metadata has at most 16 entries."
    if any(not 1 <= len(name) <= 64 or len(value) > 512 for name, value in given.items()):
        return "metadata has names of 1 to 64 characters, and values of at most 512."
    return ""
