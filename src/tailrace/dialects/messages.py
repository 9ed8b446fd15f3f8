"""The messages of a chat in OpenAI's format, to which other wires convert theirs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec

from tailrace.dialects.parts import ImageUrlPart, RefusalPart, TextPart, first_asked, text_of
from tailrace.dialects.shapes import Other
from tailrace.errors import RequestError
from tailrace.text.arguments import arguments_object
from tailrace.types import IMAGE_MARK, Image, Message, ToolCall

__all__ = [
    "MAX_MESSAGES",
    "ChatMessage",
    "FunctionCall",
    "Messages",
    "ToolCallBody",
    "has_question",
    "read_messages",
    "require_question",
    "with_images",
]

MAX_MESSAGES = 10_000


class FunctionCall(msgspec.Struct):
    name: str
    arguments: Any = None  # Any: JSON, or a text of JSON, or anything that a client makes of it


class CustomCall(msgspec.Struct):
    name: str
    input: str = ""


class ToolCallBody(msgspec.Struct):
    function: FunctionCall | None = None
    custom: CustomCall | None = None
    id: str = ""
    type: str = "function"
    index: int = 0  # of the parts of streams, which some clients send back


class ReasoningDetail(msgspec.Struct):
    """A part of a message's reasoning, in OpenRouter's format."""

    text: str = ""
    summary: str = ""


class ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]  # templates make tokens of it
    content: str | list[TextPart | ImageUrlPart | RefusalPart | Other] | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    name: str | None = None  # of a tool, in its result
    function_call: FunctionCall | None = None  # the older form of tool_calls
    reasoning_content: str | None = None
    reasoning: str | None = None  # the newer name, in vLLM and elsewhere
    reasoning_details: list[ReasoningDetail] | None = None


Messages = Annotated[list[ChatMessage], msgspec.Meta(max_length=MAX_MESSAGES)]


def read_messages(
    messages: Sequence[ChatMessage],
    notes: list[str],
    before: tuple[Message, ...] = (),
    *,
    name: str = "messages",
    images: list[Image] | None = None,
) -> tuple[Message, ...]:
    """Return messages after those in `before`. What has no effect is named in `notes`, as a part of the field `name`.
    `images` are those with a mark in the texts already, in order; it gets the others. None: the model reads none.

    Raises: RequestError if there are no messages, or none of them needs an answer.
    """
    if not messages and not before:
        raise RequestError(f"{name} must not be empty.", param=name)
    if len(before) + len(messages) > MAX_MESSAGES:  # on some wires a turn becomes several messages
        raise RequestError(f"{name} has more than {MAX_MESSAGES} entries.", param=name)
    asked_from = first_asked(["tool" if one.role == "function" else one.role for one in messages])
    calls = _OpenCalls()
    read = list(before)
    for index, message in enumerate(messages):
        where = f"{name}[{index}]"
        is_asked = index >= asked_from and message.role == "user"
        is_answer = message.role == "assistant"
        seen = images if message.role == "user" else None
        text = text_of(message.content, f"{where}.content", notes, is_asked=is_asked, is_answer=is_answer, images=seen)
        notes.extend(f"{name}[].{field}" for field in _unused_fields(message))
        # `developer` is a newer name of the role system, which templates do not know; `function` an older one of tool.
        role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
        called = tuple(calls.add(call) for call in _calls_of(message)) if is_answer else ()
        ended = calls.ended_by(message) if role == "tool" else ""
        reasoning = _reasoning_of(message) if is_answer else ""
        read.append(Message(role, text, called, ended, reasoning))
    require_question(read, param=name)
    return with_images(read, images or ())


def with_images(messages: Iterable[Message], images: Iterable[Image]) -> tuple[Message, ...]:
    """Return the messages with the images that have marks in them, in order."""
    rest = iter(images)
    return tuple(
        replace(one, images=tuple(islice(rest, number))) if (number := one.content.count(IMAGE_MARK)) else one
        for one in messages
    )


def has_question(messages: Sequence[Message]) -> bool:
    """Return whether there is a message of a user or a tool."""
    return any(message.role in ("user", "tool") for message in messages)


def require_question(messages: Sequence[Message], *, param: str = "messages") -> None:
    """Require a message that can be answered: of a user, a tool or the system. Raises: RequestError."""
    if all(message.role == "assistant" for message in messages):
        raise RequestError(f"{param} must have a message that is not the assistant's.", param=param)


def _unused_fields(message: ChatMessage) -> list[str]:
    """Return the names of fields that have a meaning only in messages of another role."""
    unused = []
    if message.role != "assistant":
        names = ("tool_calls", "function_call", "reasoning_content", "reasoning", "reasoning_details")
        unused = [name for name in names if getattr(message, name)]
    return [*unused, "name"] if message.name and message.role not in ("tool", "function") else unused


def _reasoning_of(message: ChatMessage) -> str:
    details = "".join(detail.text or detail.summary for detail in message.reasoning_details or ())
    return message.reasoning_content or message.reasoning or details


def _calls_of(message: ChatMessage) -> list[ToolCall]:
    """Return the calls of a message. Those without an id have an empty one."""
    calls = []
    for call in message.tool_calls or ():
        if call.function is not None:
            calls.append(ToolCall(call.id, call.function.name, arguments_object(call.function.arguments)))
        elif call.custom is not None:
            calls.append(ToolCall(call.id, call.custom.name, arguments_object({"input": call.custom.input})))
    if message.function_call is not None:
        older = message.function_call
        calls.append(ToolCall("", older.name, arguments_object(older.arguments)))
    return calls


class _OpenCalls:
    """The calls of a chat that have no result yet, the oldest first. Some APIs have no ids of calls, which templates
    need: calls without one get an id, and a result without one belongs to the oldest call of its tool. The time is
    linear in the length of the chat."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._all: deque[str] = deque()
        self._by_name: dict[str, deque[str]] = {}
        self._ended: set[str] = set()

    def add(self, call: ToolCall) -> ToolCall:
        """Return the call with an id."""
        self._num_calls += 1
        call_id = call.call_id or f"call{self._num_calls:05}"  # some templates require nine characters
        self._all.append(call_id)
        self._by_name.setdefault(call.name, deque()).append(call_id)
        return ToolCall(call_id, call.name, call.arguments)

    def ended_by(self, message: ChatMessage) -> str:
        """Return the id of the call to which a result belongs; "" if there is none."""
        if message.tool_call_id:
            self._ended.add(message.tool_call_id)
            return message.tool_call_id
        ids = self._all if message.name is None else self._by_name.get(message.name, deque())
        while ids:
            call_id = ids.popleft()
            if call_id not in self._ended:
                self._ended.add(call_id)
                return call_id
        return ""
