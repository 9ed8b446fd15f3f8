"""OpenAI's items, in the `input` of responses and in conversations: messages, tool calls and their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from tailrace.conversations.items import Item
from tailrace.dialects.bodies import JsonBody, read_fields
from tailrace.dialects.fields import MAX_MESSAGES, TextPart
from tailrace.errors import RequestError

__all__ = ["item_json", "items_from", "read_items"]


class InputText(TextPart, tag="input_text"):
    pass


class OutputText(TextPart, tag="output_text"):
    annotations: list[JsonBody] | None = None
    logprobs: list[JsonBody] | None = None


class _Item(msgspec.Struct):
    """Fields of a response's items. They have no effect when a client sends them back."""

    id: str | None = None
    status: str | None = None


class InputMessage(_Item, tag="message", kw_only=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText | OutputText]


class FunctionCallItem(_Item, tag="function_call", kw_only=True):
    call_id: str
    name: str
    arguments: str


class ReasoningText(TextPart, tag="reasoning_text"):
    pass


class ReasoningItem(_Item, tag="reasoning", kw_only=True):
    content: list[ReasoningText] | None = None
    summary: list[JsonBody] | None = None
    encrypted_content: str | None = None


class FunctionOutputItem(_Item, tag="function_call_output", kw_only=True):
    call_id: str
    output: str | list[InputText]


InputItem: TypeAlias = InputMessage | ReasoningItem | FunctionCallItem | FunctionOutputItem


class _Items(msgspec.Struct):
    input: list[InputItem]


def read_items(
    given: str | list[JsonBody], *, name: str = "input", may_be_empty: bool = False
) -> tuple[list[InputItem], tuple[str, ...]]:
    """Return the items, and the names of unknown fields in them. Raises: RequestError."""
    if isinstance(given, str):
        return [InputMessage(role="user", content=given)], ()
    if not given and not may_be_empty:
        raise RequestError(f"{name} must not be empty.", param=name)
    if len(given) > MAX_MESSAGES:
        raise RequestError(f"{name} has more than {MAX_MESSAGES} entries.", param=name)
    typed = [item if "type" in item else {**item, "type": "message"} for item in given]
    try:
        found, ignored = read_fields({"input": typed}, _Items)
    except RequestError as error:
        which = (error.param or "input").partition(".")[0].replace("input", name, 1)
        raise RequestError(
            f"{which} must be a message of text, reasoning, a function_call or a function_call_output.", param=name
        ) from None
    return found.input, tuple(one.replace("input", name, 1) for one in ignored)


def items_from(given: list[InputItem]) -> tuple[Item, ...]:
    """Return the items of a conversation. Reasoning becomes a part of the assistant's next message or call; without
    one, of an empty message."""
    items: list[Item] = []
    reasoning = ""
    for one in given:
        if isinstance(one, ReasoningItem):
            reasoning += _text(one.content or [])
            continue
        item = _item(one)
        if reasoning and (item.role == "assistant" or item.kind == "function_call"):
            item = msgspec.structs.replace(item, reasoning=reasoning)
        elif reasoning:
            items.append(Item(role="assistant", reasoning=reasoning))
        items.append(item)
        reasoning = ""
    return (*items, Item(role="assistant", reasoning=reasoning)) if reasoning else tuple(items)


def _item(one: InputMessage | FunctionCallItem | FunctionOutputItem) -> Item:
    match one:
        case FunctionCallItem():
            return Item(kind="function_call", text=one.arguments, call_id=one.call_id, name=one.name)
        case FunctionOutputItem():
            return Item(kind="function_call_output", text=_text(one.output), call_id=one.call_id)
        case InputMessage():
            return Item(role=one.role, text=_text(one.content))


def item_json(item: Item) -> JsonBody:
    """Return an item of a conversation, with additions to OpenAI's format: `parent_id`, `created_at`, `stream_id` and
    `reasoning`."""
    shown: JsonBody = {"id": item.item_id, "type": item.kind, "status": item.status}
    match item.kind:
        case "function_call":
            shown |= {"call_id": item.call_id, "name": item.name, "arguments": item.text}
        case "function_call_output":
            shown |= {"call_id": item.call_id, "output": item.text}
        case _:
            part: JsonBody = {"type": "input_text", "text": item.text}
            if item.role == "assistant":
                part = {"type": "output_text", "text": item.text, "annotations": [], "logprobs": []}
            shown |= {"role": item.role, "content": [part]}
    if item.reasoning:
        shown["reasoning"] = item.reasoning
    shown |= {"parent_id": item.parent_id, "created_at": int(item.created_s)}
    return shown | ({"stream_id": item.stream_id} if item.stream_id else {})


def _text(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
