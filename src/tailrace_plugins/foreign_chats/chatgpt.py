"""ChatGPT's export format, `conversations.json`: a `mapping` of nodes, each with its parent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from tailrace.conversations import (
    Conversation,
    ConversationFormat,
    Draft,
    Item,
    Json,
    as_shape,
    call_of,
    clean,
    draft_of,
    seconds,
)
from tailrace.errors import RequestError

__all__ = ["FORMAT"]

_ROOT = "root"
_TO_ALL = ("", "all")


class _Author(msgspec.Struct):
    role: str
    name: str | None = None


class _Content(msgspec.Struct):
    content_type: str = "text"
    parts: list[Any] | None = None  # Any: texts, and descriptions of images and the like
    text: str | None = None


class _Message(msgspec.Struct):
    author: _Author
    content: _Content | None = None
    create_time: float | None = None
    recipient: str | None = None
    status: str | None = None
    metadata: dict[str, Any] | None = None  # Any: OpenAI may add fields


class _Node(msgspec.Struct):
    message: _Message | None = None
    parent: str | None = None


class _Export(msgspec.Struct):
    mapping: dict[str, _Node]
    title: str | None = None
    create_time: float | None = None
    update_time: float | None = None
    current_node: str | None = None


def read_chatgpt(value: object, where: str) -> Draft:
    """Read a conversation. Messages that are not text are skipped; their children move to their parents. Raises:
    RequestError."""
    given = as_shape(value, _Export, where)
    kept_as: dict[str, str | None] = {}  # node: its item, or that of its nearest ancestor
    items: list[Item] = []
    by_id: dict[str, Item] = {}
    num_left_out = 0
    for name, node in _in_order(given.mapping, where):
        before = kept_as.get(node.parent) if node.parent is not None else None
        kept_as[name] = before
        item = _item_of(node.message, by_id.get(before or ""), name) if node.message is not None else None
        if item is not None:
            item = replace(item, item_id=f"item_{len(items)}", parent_id=before)
            kept_as[name] = item.item_id
            by_id[item.item_id] = item
            items.append(item)
        elif node.message is not None and _says_something(node.message):
            num_left_out += 1
    head = kept_as.get(given.current_node or "", items[-1].item_id if items else None)
    return draft_of(
        items,
        head,
        title=given.title,
        created_s=given.create_time,
        updated_s=given.update_time,
        num_left_out=num_left_out,
    )


def _in_order(mapping: dict[str, _Node], where: str) -> Iterator[tuple[str, _Node]]:
    """Yield the nodes, parents before their children. Raises: RequestError if there is a loop."""
    children: dict[str | None, list[str]] = {}
    for name, node in mapping.items():
        parent = node.parent if node.parent in mapping else None
        children.setdefault(parent, []).append(name)
    waiting = children.get(None, [])[::-1]
    num_seen = 0
    while waiting:
        name = waiting.pop()
        num_seen += 1
        yield name, mapping[name]
        waiting += children.get(name, [])[::-1]
    if num_seen < len(mapping):
        raise RequestError(f"{where}.mapping: the parents form a loop.", param=f"{where}.mapping")


def _item_of(message: _Message, before: Item | None, node: str) -> Item | None:
    text, role = clean(_text(message)), message.author.role
    if not text.strip() or (message.metadata or {}).get("is_visually_hidden_from_conversation"):
        return None
    item: Item | None = None
    call_id = str((message.metadata or {}).get("call_id") or node)
    if role == "tool":
        if before is not None and before.kind == "function_call":
            item = Item(kind="function_call_output", text=text, call_id=before.call_id)
    elif role == "assistant" and (message.recipient or "") not in _TO_ALL:
        item = call_of(text, message.recipient or "", call_id)
    if item is None and role in ("system", "developer", "user", "assistant"):
        item = Item(role=role, text=text)
    if item is None:
        return None
    status = "completed" if message.status in (None, "finished_successfully") else "incomplete"
    return replace(item, status=status, created_s=seconds(message.create_time))


def _text(message: _Message) -> str:
    content = message.content
    if content is None or content.content_type not in ("text", "multimodal_text", "code"):
        return ""
    parts = [part for part in content.parts or () if isinstance(part, str)]
    return content.text if content.text is not None else "\n".join(parts)


def _says_something(message: _Message) -> bool:
    is_hidden = (message.metadata or {}).get("is_visually_hidden_from_conversation")
    content = message.content
    return not is_hidden and content is not None and bool(content.text or any(content.parts or ()))


def write_chatgpt(conversation: Conversation, items: Sequence[Item]) -> Json:
    children: dict[str | None, list[str]] = {}
    for item in items:
        children.setdefault(item.parent_id, []).append(item.item_id)
    mapping: Json = {_ROOT: {"id": _ROOT, "message": None, "parent": None, "children": children.get(None, [])}}
    for item in items:
        mapping[item.item_id] = {
            "id": item.item_id,
            "message": _message_of(item),
            "parent": item.parent_id or _ROOT,
            "children": children.get(item.item_id, []),
        }
    return {
        "id": conversation.conversation_id,
        "conversation_id": conversation.conversation_id,
        "title": conversation.title,
        "create_time": conversation.created_s,
        "update_time": conversation.updated_s,
        "mapping": mapping,
        "current_node": conversation.head or _ROOT,
    }


def _message_of(item: Item) -> Json:
    role, recipient, content = item.role, "all", {"content_type": "text", "parts": [item.text]}
    metadata: Json = {"call_id": item.call_id} if item.call_id else {}
    if item.kind == "function_call":
        role, recipient, content = "assistant", item.name, {"content_type": "code", "text": item.text}
    elif item.kind == "function_call_output":
        role = "tool"
    return {
        "id": item.item_id,
        "author": {"role": role, "name": None, "metadata": {}},
        "create_time": item.created_s,
        "update_time": None,
        "content": content,
        "status": "finished_successfully" if item.status == "completed" else "finished_partial_completion",
        "end_turn": role == "assistant" and item.kind == "message",
        "weight": 1.0,
        "metadata": metadata,
        "recipient": recipient,
    }


def _fits(value: object) -> bool:
    return isinstance(value, dict) and "mapping" in value


FORMAT = ConversationFormat(
    "chatgpt", "ChatGPT (conversations.json)", fits=_fits, read=read_chatgpt, write=write_chatgpt
)
