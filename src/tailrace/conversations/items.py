"""The items of a conversation, and their conversion to the messages of a prompt.

A conversation is a tree: each item has a parent. Several children of one item start branches. The current branch leads
from the root to the conversation's `head`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from tailrace.conversations.item_images import ItemImage, marked, unmarked
from tailrace.errors import ConversationLocked, RequestError
from tailrace.text.arguments import arguments_object
from tailrace.types import Image, Message, ToolCall

__all__ = [
    "ID_PREFIXES",
    "MAX_CHARACTERS",
    "MAX_ITEMS",
    "MAX_TITLE",
    "Branch",
    "BranchPoint",
    "Conversation",
    "Item",
    "ItemId",
    "ItemKind",
    "ItemStatus",
    "chained",
    "check_items",
    "items_of",
    "messages_of",
    "metadata_fault",
    "title_from",
    "without_marks",
]

MAX_ITEMS = 10_000  # of one conversation
MAX_CHARACTERS = 8_000_000  # of the items of one conversation
MAX_TITLE = 200
ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}
_MAX_AUTOMATIC_TITLE = 80  # characters of a title that is made from a message

ItemKind: TypeAlias = Literal["message", "function_call", "function_call_output"]
ItemId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
ItemStatus: TypeAlias = Literal["completed", "incomplete", "in_progress"]


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A message, a tool call, or a tool's output. `text` is the text of the message, the call's arguments as JSON, or
    the output."""

    item_id: str = ""  # "" until it is added
    parent_id: str | None = None
    kind: ItemKind = "message"
    role: str = ""  # of a message
    text: str = ""
    reasoning: str = ""  # what the assistant thought before the text
    call_id: str = ""  # links a call and its output
    name: str = ""  # of the called function
    status: ItemStatus = "completed"
    stream_id: str = ""  # the stream of an answer
    created_s: float = 0.0  # since the epoch
    images: tuple[ItemImage, ...] = ()  # of a user's message


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation without its items. Times are seconds since the epoch."""

    conversation_id: str = ""  # "" until it is stored
    title: str = ""
    created_s: float = 0.0
    updated_s: float = 0.0
    metadata: Mapping[str, str] = {}
    head: str | None = None  # the last item of the current branch
    num_items: int = 0
    num_characters: int = 0  # of the texts of all items


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """A branch that a request continues: the items from the root to the one that its input follows."""

    conversation_id: str
    items: tuple[Item, ...] = ()

    @property
    def parent_id(self) -> str | None:
        return self.items[-1].item_id if self.items else None

    def require_free(self) -> None:
        """Raises: ConversationLocked if the last item is an answer in progress."""
        if self.items and self.items[-1].status == "in_progress":
            raise ConversationLocked(
                "The last answer is still in progress. Wait for it, cancel its stream, or choose another parent_id.",
                param="conversation",
                retry_after_s=1.0,
            )

    def before_last(self) -> Branch:
        return msgspec.structs.replace(self, items=self.items[:-1])


class BranchPoint(msgspec.Struct, frozen=True):
    """A conversation, and the item that the input follows. Without `parent_id` it is the last item of the current
    branch; with null the input starts a new root. An item that already has children starts a new branch."""

    id: ItemId
    parent_id: ItemId | UnsetType | None = UNSET


def messages_of(items: Iterable[Item]) -> tuple[Message, ...]:
    """Return the messages of a prompt. Tool calls join the assistant's message before them. Images have no content
    yet."""
    messages: list[Message] = []
    for are_calls, group in groupby(items, lambda item: item.kind == "function_call"):
        if are_calls:
            called = list(group)
            calls = tuple(ToolCall(item.call_id, item.name, arguments_object(item.text)) for item in called)
            spoken = messages.pop() if messages and messages[-1].role == "assistant" else Message("assistant", "")
            thought = spoken.reasoning or next((item.reasoning for item in called if item.reasoning), "")
            messages.append(Message("assistant", spoken.content, calls, reasoning=thought))
            continue
        for item in group:
            if item.kind == "function_call_output":
                messages.append(Message("tool", item.text, tool_call_id=item.call_id))
            else:  # chat templates do not know "developer", the newer name of the role "system"
                role = "system" if item.role == "developer" else item.role
                images = tuple(Image(b"", "conversation", kept=image.kept) for image in item.images)
                text = marked(item.text, item.images)
                messages.append(Message(role, text, reasoning=item.reasoning, images=images))
    return tuple(messages)


def items_of(messages: Iterable[Message]) -> tuple[Item, ...]:
    """Return the items for messages: the inverse of `messages_of`."""
    items: list[Item] = []
    for message in messages:
        if message.role == "tool":
            items.append(Item(kind="function_call_output", text=message.content, call_id=message.tool_call_id))
            continue
        if message.content or message.reasoning or not message.tool_calls:
            text, images = unmarked(message.content)
            items.append(Item(role=message.role, text=text, reasoning=message.reasoning, images=images))
        items += (
            Item(kind="function_call", text=call.arguments, call_id=call.call_id, name=call.name)
            for call in message.tool_calls
        )
    return tuple(items)


def without_marks(item: Item) -> Item:
    """Return an item of a request with its images beside its text, which has no marks."""
    text, images = unmarked(item.text)
    return msgspec.structs.replace(item, text=text, images=images) if images else item


def chained(items: Sequence[Item], ids: Iterable[str], parent_id: str | None, created_s: float) -> list[Item]:
    """Return the items as a chain after `parent_id`, with these ids."""
    placed: list[Item] = []
    for item, item_id in zip(items, ids, strict=False):
        placed.append(msgspec.structs.replace(item, item_id=item_id, parent_id=parent_id, created_s=created_s))
        parent_id = item_id
    return placed


def check_items(items: Iterable[Item]) -> None:
    """Raises: RequestError for NUL characters, or texts that are too long for a conversation."""
    num_characters = 0
    for item in items:
        texts = (item.text, item.reasoning, item.call_id, item.name)
        if any("\0" in text for text in texts):
            raise RequestError("Texts must not contain NUL characters.", param="items")
        num_characters += sum(map(len, texts))
    if num_characters > MAX_CHARACTERS:
        raise RequestError(f"The texts of a conversation can have at most {MAX_CHARACTERS} characters.", param="items")


def title_from(items: Iterable[Item]) -> str:
    """Return a title made from the beginning of the first user message."""
    first_text = next((item.text for item in items if item.role == "user" and item.text.strip()), "")
    line = re.sub(r"\s+", " ", first_text[: 10 * _MAX_AUTOMATIC_TITLE]).strip()
    return line if len(line) <= _MAX_AUTOMATIC_TITLE else line[: _MAX_AUTOMATIC_TITLE - 1].rstrip() + "…"


def metadata_fault(given: Mapping[str, str]) -> str:
    """Return what is wrong with metadata, or "". The limits are those of OpenAI's API."""
    if len(given) > 16:
        return "metadata can have at most 16 entries."
    if any(not 1 <= len(name) <= 64 or len(value) > 512 for name, value in given.items()):
        return "metadata needs names of 1 to 64 characters, and values of at most 512."
    return ""
