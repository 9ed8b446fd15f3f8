"""OpenAI's items, in the `input` of responses and in conversations: messages, tool calls and their results.

Items of other kinds, such as the calls of a server's own tools, are left out, and named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from tailrace.conversations.item_images import image_id
from tailrace.conversations.items import Item
from tailrace.dialects.bodies import JsonBody, printable
from tailrace.dialects.images import image_of_id, image_of_url
from tailrace.dialects.messages import MAX_MESSAGES
from tailrace.dialects.parts import ImagePart, RefusalPart, TextPart, first_asked, text_of
from tailrace.dialects.shapes import Other, note
from tailrace.errors import RequestError
from tailrace.text.arguments import arguments_object
from tailrace.text.custom_calls import CUSTOM_INPUT
from tailrace.types import Image

__all__ = ["InputItem", "flat_name", "item_json", "items_from"]

_LOCAL_SHELL = "local_shell"  # the name of OpenAI's built-in shell, of which a history may have calls


class InputText(TextPart, tag="input_text"):
    pass


class PlainText(TextPart, tag="text"):
    pass


class InputImage(ImagePart, tag="input_image"):
    image_url: str | None = None
    file_id: str | None = None

    def image(self, where: str) -> Image:
        """Raises: RequestError."""
        if self.image_url is None:
            return image_of_id(self.file_id or "", f"{where}.file_id")
        return image_of_url(self.image_url, f"{where}.image_url")


class OutputText(TextPart, tag="output_text"):
    annotations: list[JsonBody] | None = None
    logprobs: list[JsonBody] | None = None


class ReasoningText(TextPart, tag="reasoning_text"):
    pass


Content: TypeAlias = str | list[InputText | InputImage | OutputText | PlainText | RefusalPart | Other] | None


class _Item(msgspec.Struct):
    """Fields of a response's items. They have no effect when a client sends them back."""

    id: str | None = None
    status: str | None = None


class InputMessage(_Item, tag="message", kw_only=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content = None


class ReasoningItem(_Item, tag="reasoning", kw_only=True):
    content: list[ReasoningText | PlainText | Other] | None = None
    summary: list[JsonBody] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(_Item, tag="function_call", kw_only=True):
    call_id: str
    name: str
    arguments: Any = None  # Any: JSON, or what a client makes of it
    namespace: str | None = None


class FunctionOutputItem(_Item, tag="function_call_output", kw_only=True):
    call_id: str
    output: Content = None


class CustomCallItem(_Item, tag="custom_tool_call", kw_only=True):
    call_id: str
    name: str
    input: str = ""
    namespace: str | None = None


class CustomOutputItem(_Item, tag="custom_tool_call_output", kw_only=True):
    call_id: str
    output: Content = None


class LocalShellCallItem(_Item, tag="local_shell_call", kw_only=True):
    action: JsonBody
    call_id: str | None = None


class LocalShellOutputItem(_Item, tag="local_shell_call_output", kw_only=True):
    call_id: str | None = None
    output: Content = None


class ItemReference(_Item, tag="item_reference"):
    pass


InputItem: TypeAlias = (
    InputMessage
    | ReasoningItem
    | FunctionCallItem
    | FunctionOutputItem
    | CustomCallItem
    | CustomOutputItem
    | LocalShellCallItem
    | LocalShellOutputItem
    | ItemReference
    | Other
)


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name that the model sees."""
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}" if namespace else name


def items_from(
    given: str | Sequence[InputItem] | None,
    notes: list[str],
    *,
    name: str = "input",
    images: list[Image] | None = None,
) -> tuple[Item, ...]:
    """Return the items of the field `name`. Reasoning becomes a part of the assistant's next message or call; without
    one, of an empty message. `images` gets the images of users, which have marks in the texts; None: they are not read.
    Raises: RequestError."""
    if isinstance(given, str):
        return (Item(role="user", text=given),)
    if given is not None and len(given) > MAX_MESSAGES:
        raise RequestError(f"{name} has more than {MAX_MESSAGES} entries.", param=name)
    asked_from = first_asked([_role_of(one) for one in given or ()])
    items: list[Item] = []
    reasoning = ""
    for index, one in enumerate(given or ()):
        where = f"{name}[{index}]"
        if isinstance(one, ReasoningItem):
            reasoning += text_of(one.content, f"{where}.content", notes, is_answer=True)
            continue
        item = _item(one, where, notes, images, is_asked=index >= asked_from)
        if item is None:
            continue
        if reasoning and (item.role == "assistant" or item.kind == "function_call"):
            item = msgspec.structs.replace(item, reasoning=reasoning)
        elif reasoning:
            items.append(Item(role="assistant", reasoning=reasoning))
        items.append(item)
        reasoning = ""
    return (*items, Item(role="assistant", reasoning=reasoning)) if reasoning else tuple(items)


def _role_of(one: InputItem) -> str:
    """Return whose an item is, for `first_asked`."""
    match one:
        case InputMessage():
            return one.role
        case FunctionOutputItem() | CustomOutputItem() | LocalShellOutputItem():
            return "tool"
    return "assistant"


def _item(one: InputItem, where: str, notes: list[str], images: list[Image] | None, *, is_asked: bool) -> Item | None:
    """Return an item; None if it is left out. Raises: RequestError."""
    match one:
        case FunctionCallItem():
            name = flat_name(one.namespace, one.name)
            return Item(kind="function_call", text=arguments_object(one.arguments), call_id=one.call_id, name=name)
        case CustomCallItem():
            text, name = arguments_object({CUSTOM_INPUT: one.input}), flat_name(one.namespace, one.name)
            return Item(kind="function_call", text=text, call_id=one.call_id, name=name)
        case LocalShellCallItem():
            text = arguments_object(one.action)
            return Item(kind="function_call", text=text, call_id=one.call_id or one.id or "", name=_LOCAL_SHELL)
        case FunctionOutputItem() | CustomOutputItem() | LocalShellOutputItem():
            output = text_of(one.output, f"{where}.output", notes)
            return Item(kind="function_call_output", text=output, call_id=one.call_id or one.id or "")
        case InputMessage():
            is_asked, is_answer = is_asked and one.role == "user", one.role == "assistant"
            seen = images if one.role == "user" else None
            text = text_of(one.content, f"{where}.content", notes, is_asked=is_asked, is_answer=is_answer, images=seen)
            return Item(role=one.role, text=text)
        case ItemReference():
            raise RequestError(f"{where}: send the item itself, or use previous_response_id.", param=where)
        case Other():
            notes.append(note(where, printable(one.kind)))
    return None


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
            parts = _input_parts(item)
            if item.role == "assistant":
                parts = [{"type": "output_text", "text": item.text, "annotations": [], "logprobs": []}]
            shown |= {"role": item.role, "content": parts}
    if item.reasoning:
        shown["reasoning"] = item.reasoning
    shown |= {"parent_id": item.parent_id, "created_at": int(item.created_s)}
    return shown | ({"stream_id": item.stream_id} if item.stream_id else {})


def _input_parts(item: Item) -> list[JsonBody]:
    """Return the texts and images of a message in their order: a text alone if it has no images."""
    parts: list[JsonBody] = []
    start = 0
    for image in item.images:
        if text := item.text[start : image.at]:
            parts.append({"type": "input_text", "text": text})
        parts.append({"type": "input_image", "detail": "auto", "file_id": image_id(image)})
        start = image.at
    if (text := item.text[start:]) or not parts:
        parts.append({"type": "input_text", "text": text})
    return parts
