"""The items of a response's `input`: messages, calls of tools and their results."""

from __future__ import annotations

from itertools import groupby
from typing import Literal

import msgspec

from tailrace.dialects.bodies import JsonBody, read_fields
from tailrace.dialects.fields import MAX_MESSAGES, TextPart
from tailrace.errors import RequestError
from tailrace.types import Message, ToolCall

__all__ = ["messages_of", "read_items"]


class InputText(TextPart, tag="input_text"):
    pass


class OutputText(TextPart, tag="output_text"):
    annotations: list[JsonBody] | None = None
    logprobs: list[JsonBody] | None = None


class _Item(msgspec.Struct):
    """What a response's own items have, and ask for nothing when a client hands them back."""

    id: str | None = None
    status: str | None = None


class InputMessage(_Item, tag="message", kw_only=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText | OutputText]


class FunctionCallItem(_Item, tag="function_call", kw_only=True):
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(_Item, tag="function_call_output", kw_only=True):
    call_id: str
    output: str | list[InputText]


Item = InputMessage | FunctionCallItem | FunctionOutputItem


class _Items(msgspec.Struct):
    input: list[Item]


def read_items(given: str | list[JsonBody]) -> tuple[list[Item], tuple[str, ...]]:
    """The items, and the names of the fields in them that nobody knows."""
    if isinstance(given, str):
        return [InputMessage(role="user", content=given)], ()
    if not given:
        raise RequestError("input is empty.", param="input")
    if len(given) > MAX_MESSAGES:
        raise RequestError(f"input has more than {MAX_MESSAGES} entries.", param="input")
    typed = [item if "type" in item else {**item, "type": "message"} for item in given]
    try:
        found, ignored = read_fields({"input": typed}, _Items)
    except RequestError as error:
        which = (error.param or "input").partition(".")[0]
        raise RequestError(
            f"{which} is not a message of text, a function_call or a function_call_output.", param="input"
        ) from None
    return found.input, ignored


def messages_of(items: list[Item]) -> tuple[Message, ...]:
    messages: list[Message] = []
    for are_calls, group in groupby(items, lambda item: isinstance(item, FunctionCallItem)):
        if are_calls:  # of one turn, with what was said before them
            calls = tuple(
                ToolCall(one.call_id, one.name, one.arguments) for one in group if isinstance(one, FunctionCallItem)
            )
            said = messages.pop().content if messages and messages[-1].role == "assistant" else ""
            messages.append(Message("assistant", said, calls))
            continue
        for one in group:
            if isinstance(one, FunctionOutputItem):
                messages.append(Message("tool", _text(one.output), tool_call_id=one.call_id))
            elif isinstance(one, InputMessage):
                messages.append(Message("system" if one.role == "developer" else one.role, _text(one.content)))
    return tuple(messages)


def _text(content: str | list[InputText] | list[InputText | OutputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
