"""The fields of a body that several wires share, with the ranges that hold on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from tailrace.dialects.wire import JsonBody, printable
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.types import Message, Sampling

__all__ = [
    "ChatMessage",
    "SamplingFields",
    "Seed",
    "Tokens",
    "read_messages",
    "sampling_of",
    "stops",
    "unknown_in_messages",
]

_MAX_STOPS = 4
_MAX_MESSAGES = 10_000
_MAX_STOP_CHARACTERS = 256

Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class SamplingFields(msgspec.Struct, kw_only=True):
    """Sampling as OpenAI names it; what its API lacks is named as in vLLM. None is as good as absent."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=1_000_000)] | None = None
    min_p: _Fraction | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    seed: Seed | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None


class TextPart(msgspec.Struct, tag="text"):
    text: str


class ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant"]  # templates build control tokens from it
    content: str | list[TextPart] | None = None
    tool_calls: object = None
    function_call: object = None


def sampling_of(fields: SamplingFields, *, logprobs: bool = False, default_max_tokens: int | None = None) -> Sampling:
    """The sampling parameters, with what was left out at its neutral value. Raises: RequestError."""
    named = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
             "seed", "max_tokens", "ignore_eos", "n")  # fmt: skip
    given = {name: value for name in named if (value := getattr(fields, name)) is not None}
    given.setdefault("max_tokens", default_max_tokens)
    if fields.max_completion_tokens is not None:
        given["max_tokens"] = fields.max_completion_tokens
    if given.get("top_k") == -1:  # vLLM's way to say off
        del given["top_k"]
    if given.get("temperature") == 0:
        # The likeliest token does not depend on these, and no engine need be asked whether it agrees.
        for name in ("top_p", "top_k", "min_p"):
            given.pop(name, None)
    return Sampling(**given, logprobs=logprobs, stop=stops(fields.stop))


def read_messages(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Messages with their text parts joined. Raises: RequestError if there are none."""
    if not messages:
        raise RequestError("messages is empty.", param="messages")
    if len(messages) > _MAX_MESSAGES:
        raise RequestError(f"messages has more than {_MAX_MESSAGES} entries.", param="messages")
    for message in messages:
        if message.tool_calls or message.function_call:
            raise UnsupportedParameter("Tool calls are not supported here.", param="messages")
        if message.content is None and message.role != "assistant":
            raise RequestError("A message has no content.", param="messages")
    return tuple(Message(message.role, _text(message.content)) for message in messages)


def unknown_in_messages(body: JsonBody) -> tuple[str, ...]:
    """Fields of messages that nobody here knows, as `messages[].name`. To be asked once the body has been read."""
    known = set(ChatMessage.__struct_fields__)
    names = {name for message in body.get("messages") or [] for name in message if name not in known}
    return tuple(f"messages[].{printable(name)}" for name in sorted(names)[:10])


def _text(content: str | list[TextPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or [])


def stops(stop: str | list[str] | None, *, name: str = "stop") -> tuple[str, ...]:
    """Stop strings in any of the forms that clients send. Raises: RequestError."""
    given = [stop] if isinstance(stop, str) else stop or []
    if len(given) > _MAX_STOPS:
        raise RequestError(f"{name} takes at most {_MAX_STOPS} strings.", param=name)
    if any(not 1 <= len(one) <= _MAX_STOP_CHARACTERS for one in given):
        raise RequestError(f"Each string in {name} has 1 to {_MAX_STOP_CHARACTERS} characters.", param=name)
    return tuple(given)
