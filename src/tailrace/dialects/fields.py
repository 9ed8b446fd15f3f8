"""Fields of bodies that several wires share, with the same ranges on each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from tailrace.dialects.bodies import to_json
from tailrace.errors import RequestError
from tailrace.types import Message, Sampling, TemplateValue, ToolCall

__all__ = [
    "MAX_MESSAGES",
    "ChatMessage",
    "CommonFields",
    "FunctionCall",
    "Messages",
    "RepetitionPenalty",
    "SamplingFields",
    "TemplateValues",
    "TextPart",
    "Tokens",
    "ToolCallBody",
    "read_messages",
    "require_question",
    "sampling_of",
    "stops",
    "template_values",
]

_MAX_STOPS = 4
_MAX_TEMPLATE_VALUES = 16
_MAX_NUMBER = 2**53
_WORD = re.compile(r"[A-Za-z0-9_.-]{0,64}")
MAX_MESSAGES = 10_000
_MAX_STOP_CHARACTERS = 256

Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
RepetitionPenalty = Annotated[float, msgspec.Meta(gt=0, le=100)]
_Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class CommonFields(msgspec.Struct, kw_only=True):
    """Sampling parameters with the names of almost all APIs. None means absent."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=1_000_000)] | None = None
    min_p: _Fraction | None = None
    typical_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None


class SamplingFields(CommonFields, kw_only=True):
    """Also the parameters of OpenAI, vLLM and llama.cpp, with their names."""

    repetition_penalty: RepetitionPenalty | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None


class TextPart(msgspec.Struct, tag="text"):
    text: str


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""  # Any: JSON, for the chat template


class ToolCallBody(msgspec.Struct):
    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]  # templates build control tokens from it
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


Messages = Annotated[list[ChatMessage], msgspec.Meta(max_length=MAX_MESSAGES)]


TemplateValues: TypeAlias = dict[str, TemplateValue]  # by their names in the chat template


_SAMPLING = set(SamplingFields.__struct_fields__) - {"max_completion_tokens", "stop"}  # as in `Sampling`


def sampling_of(fields: SamplingFields) -> Sampling:
    """Return the sampling parameters. Absent ones have neutral values. Raises: RequestError."""
    given = {name: value for name in _SAMPLING if (value := getattr(fields, name)) is not None}
    if fields.max_completion_tokens is not None:
        given["max_tokens"] = fields.max_completion_tokens
    if given.get("top_k") == -1:  # off, in vLLM
        del given["top_k"]
    if given.get("temperature") == 0:
        # They do not change the likeliest token, so engines without them can serve the request.
        for name in ("top_p", "top_k", "min_p", "typical_p"):
            given.pop(name, None)
    return Sampling(**given, stop=stops(fields.stop))


def read_messages(messages: Sequence[ChatMessage], before: tuple[Message, ...] = ()) -> tuple[Message, ...]:
    """Return messages with their text parts joined, after the messages in `before`. Raises: RequestError if there are
    none, or none of them needs an answer."""
    if not messages and not before:
        raise RequestError("messages must not be empty.", param="messages")
    if len(before) + len(messages) > MAX_MESSAGES:  # on some wires a turn becomes several messages
        raise RequestError(f"messages has more than {MAX_MESSAGES} entries.", param="messages")
    for message in messages:
        if message.content is None and message.role != "assistant":
            raise RequestError("A message has no content.", param="messages")
        if message.tool_calls and message.role != "assistant":
            raise RequestError("Only an assistant's message has tool_calls.", param="messages")
        if message.reasoning_content and message.role != "assistant":
            raise RequestError("Only an assistant's message has reasoning_content.", param="messages")
    read = before + tuple(_message(message) for message in messages)
    require_question(read)
    return read


def require_question(messages: Sequence[Message], *, param: str = "messages") -> None:
    """Require a message of a user or a tool. Many chat templates fail without one, and models were not trained on it.
    Raises: RequestError."""
    if not any(message.role in ("user", "tool") for message in messages):
        raise RequestError(f"{param} must have a message of a user or a tool.", param=param)


def _message(message: ChatMessage) -> Message:
    calls = tuple(
        ToolCall(call.id, call.function.name, _arguments(call.function.arguments)) for call in message.tool_calls or ()
    )
    # A newer name of the role system, which templates do not know.
    role = "system" if message.role == "developer" else message.role
    return Message(role, _text(message.content), calls, message.tool_call_id or "", message.reasoning_content or "")


def _arguments(arguments: str | dict[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else to_json(arguments).decode()


def _text(content: str | list[TextPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or [])


def template_values(given: TemplateValues | None) -> TemplateValues:
    """Check `chat_template_kwargs`, which are vLLM's name for values of the template. Texts must be single words, which
    cannot become control tokens. Raises: RequestError."""
    param, values = "chat_template_kwargs", given or {}
    if len(values) > _MAX_TEMPLATE_VALUES:
        raise RequestError(f"{param} has more than {_MAX_TEMPLATE_VALUES} entries.", param=param)
    if not all(_is_plain(value) for value in values.values()):
        raise RequestError(f"Values of {param} must be numbers, true, false, null or single words.", param=param)
    return values


def _is_plain(value: TemplateValue) -> bool:
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None
    return value is None or abs(value) < _MAX_NUMBER


def stops(stop: str | list[str] | None, *, name: str = "stop") -> tuple[str, ...]:
    """Return the stop strings, given as one string or a list. Raises: RequestError."""
    given = [stop] if isinstance(stop, str) else stop or []
    if len(given) > _MAX_STOPS:
        raise RequestError(f"{name} takes at most {_MAX_STOPS} strings.", param=name)
    if any(not 1 <= len(one) <= _MAX_STOP_CHARACTERS for one in given):
        raise RequestError(f"Each string in {name} must have 1 to {_MAX_STOP_CHARACTERS} characters.", param=name)
    return tuple(given)
