"""The fields of a body that several wires share, with the ranges that hold on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from tailrace.dialects.bodies import to_json
from tailrace.errors import RequestError
from tailrace.types import Grammar, Message, Sampling, ToolCall

__all__ = [
    "MAX_MESSAGES",
    "ChatMessage",
    "FunctionCall",
    "Messages",
    "SamplingFields",
    "Seed",
    "TextPart",
    "Tokens",
    "ToolCallBody",
    "read_messages",
    "require_question",
    "sampling_of",
    "stops",
]

_MAX_STOPS = 4
MAX_MESSAGES = 10_000
_MAX_STOP_CHARACTERS = 256
_MAX_BIASED = 300

Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class SamplingFields(msgspec.Struct, kw_only=True):
    """Sampling as OpenAI names it; what its API lacks is named as in vLLM and llama.cpp. None is as good as absent."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=1_000_000)] | None = None
    min_p: _Fraction | None = None
    typical_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
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


Messages = Annotated[list[ChatMessage], msgspec.Meta(max_length=MAX_MESSAGES)]


def sampling_of(
    fields: SamplingFields,
    *,
    logprobs: bool = False,
    top_logprobs: int = 0,
    logit_bias: Mapping[str, float] | None = None,
    grammar: Grammar | None = None,
    include_stop: bool = False,
    default_max_tokens: int | None = None,
) -> Sampling:
    """The sampling parameters, with what was left out at its neutral value. Raises: RequestError."""
    named = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
             "frequency_penalty", "seed", "max_tokens", "ignore_eos", "n")  # fmt: skip
    given = {name: value for name in named if (value := getattr(fields, name)) is not None}
    given.setdefault("max_tokens", default_max_tokens)
    if fields.max_completion_tokens is not None:
        given["max_tokens"] = fields.max_completion_tokens
    if given.get("top_k") == -1:  # vLLM's way to say off
        del given["top_k"]
    if given.get("temperature") == 0:
        # The likeliest token does not depend on these, and no engine need be asked whether it agrees.
        for name in ("top_p", "top_k", "min_p", "typical_p"):
            given.pop(name, None)
    return Sampling(
        **given,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        logit_bias=_bias(logit_bias or {}),
        grammar=grammar,
        include_stop=include_stop,
        stop=stops(fields.stop),
    )


def _bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    if len(bias) > _MAX_BIASED:
        raise RequestError(f"logit_bias has more than {_MAX_BIASED} entries.", param="logit_bias")
    if not all(name.isascii() and name.isdigit() and len(name) < 10 for name in bias):
        raise RequestError("logit_bias takes token ids as names.", param="logit_bias")
    if not all(-100 <= value <= 100 for value in bias.values()):
        raise RequestError("logit_bias takes values from -100 to 100.", param="logit_bias")
    return tuple((int(name), value) for name, value in bias.items())


def read_messages(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Messages with their text parts joined. Raises: RequestError if they are none, or ask for no answer."""
    if not messages:
        raise RequestError("messages is empty.", param="messages")
    if len(messages) > MAX_MESSAGES:  # `Messages` has this bound; on a wire with other turns, one may become several
        raise RequestError(f"messages has more than {MAX_MESSAGES} entries.", param="messages")
    for message in messages:
        if message.content is None and message.role != "assistant":
            raise RequestError("A message has no content.", param="messages")
        if message.tool_calls and message.role != "assistant":
            raise RequestError("Only an assistant's message has tool_calls.", param="messages")
    read = tuple(_message(message) for message in messages)
    require_question(read)
    return read


def require_question(messages: Sequence[Message], *, param: str = "messages") -> None:
    """The rule for a conversation on every wire: a user or a tool has said something. Many chat templates fail without,
    and models were not trained on it. Raises: RequestError."""
    if not any(message.role in ("user", "tool") for message in messages):
        raise RequestError(f"{param} has no message of a user or a tool.", param=param)


def _message(message: ChatMessage) -> Message:
    calls = tuple(
        ToolCall(call.id, call.function.name, _arguments(call.function.arguments)) for call in message.tool_calls or ()
    )
    # The newer name of the same role, which templates do not know.
    role = "system" if message.role == "developer" else message.role
    return Message(role, _text(message.content), calls, message.tool_call_id or "")


def _arguments(arguments: str | dict[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else to_json(arguments).decode()


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
