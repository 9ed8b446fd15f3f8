"""ShareGPT's format, which training data sets use: `{"conversations": [{"from", "value"}]}`. It has no branches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from tailrace.conversations import (
    Conversation,
    ConversationFormat,
    Draft,
    Item,
    Json,
    as_shape,
    call_of,
    chained,
    clean,
    draft_of,
)
from tailrace.errors import RequestError

__all__ = ["FORMAT"]

_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system",
}  # fmt: skip
_CALL = ("function_call", "tool_call")
_OUTPUT = ("observation", "tool", "function_response", "tool_response")
_NAMES = {"user": "human", "assistant": "gpt", "system": "system", "developer": "system"}


class _Entry(msgspec.Struct, rename={"by": "from"}):
    by: str
    value: str | None = None


class _Talk(msgspec.Struct):
    conversations: list[_Entry]
    system: str | None = None
    title: str | None = None


class _Call(msgspec.Struct):
    name: str
    arguments: Json | str = {}


def read_sharegpt(value: object, where: str) -> Draft:
    """Raises: RequestError."""
    given = as_shape(value, _Talk, where)
    items = [Item(role="system", text=clean(given.system))] if given.system else []
    unanswered: deque[str] = deque()  # ids of calls without output
    num_left_out = 0
    for index, entry in enumerate(given.conversations):
        here = f"{where}.conversations[{index}]"
        item = _item_of(entry, unanswered, here) if entry.value is not None else None
        if item is None:
            num_left_out += 1
            continue
        items.append(item)
        if item.kind == "function_call":
            unanswered.append(item.call_id)
    placed = chained(items, (f"item_{number}" for number in range(len(items))), None, 0.0)
    head = placed[-1].item_id if placed else None
    return draft_of(placed, head, title=given.title, created_s=None, updated_s=None, num_left_out=num_left_out)


def _item_of(entry: _Entry, unanswered: deque[str], here: str) -> Item | None:
    """Return the item, or None for an output without a call."""
    text = clean(entry.value or "")
    if entry.by in _OUTPUT:
        if not unanswered:
            return None
        return Item(kind="function_call_output", text=text, call_id=unanswered.popleft())
    if entry.by in _CALL:
        try:
            call = msgspec.json.decode(text, type=_Call)
        except (msgspec.DecodeError, RecursionError):
            return Item(role="assistant", text=text)
        arguments = call.arguments if isinstance(call.arguments, str) else msgspec.json.encode(call.arguments).decode()
        call_id = f"call_{here.rpartition('[')[2].rstrip(']')}"
        return call_of(arguments, call.name, call_id) or Item(role="assistant", text=text)
    if entry.by not in _ROLES:
        known = ", ".join(sorted({*_ROLES, *_CALL, *_OUTPUT}))
        raise RequestError(f"{here}.from: must be one of {known}.", param=f"{here}.from")
    return Item(role=_ROLES[entry.by], text=text)


def write_sharegpt(conversation: Conversation, items: Sequence[Item]) -> Json:
    """Write the current branch."""
    by_id = {item.item_id: item for item in items}
    branch: list[Json] = []
    at = conversation.head
    while at is not None:
        branch.append(_said_of(by_id[at]))
        at = by_id[at].parent_id
    return {"id": conversation.conversation_id, "title": conversation.title, "conversations": branch[::-1]}


def _said_of(item: Item) -> Json:
    if item.kind == "function_call":
        try:
            arguments = msgspec.json.decode(item.text)
        except (msgspec.DecodeError, RecursionError):
            arguments = item.text
        call = msgspec.json.encode({"name": item.name, "arguments": arguments}).decode()
        return {"from": "function_call", "value": call}
    if item.kind == "function_call_output":
        return {"from": "observation", "value": item.text}
    return {"from": _NAMES.get(item.role, "human"), "value": item.text}


def _fits(value: object) -> bool:
    return isinstance(value, dict) and "conversations" in value


FORMAT = ConversationFormat("sharegpt", "ShareGPT", fits=_fits, read=read_sharegpt, write=write_sharegpt)
