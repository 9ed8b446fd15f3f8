"""OpenAI's wire: `/v1/chat/completions` and `/v1/completions`.

Streams are exactly `data: ` and one line of JSON per chunk, ending in `data: [DONE]`, also after an error. There are no
`id:` lines: the official client takes a heartbeat after one for an event without JSON. A failure in the middle is a
frame with `error` (which OpenAI's clients raise) and `error_type` (which Hugging Face's raise).

Divergences, on purpose: 1. A stream that was cancelled ends in an error frame, not in a finish_reason that the API does
not have. 2. In a chat `finish_reason` has a chunk of its own, as OpenAI sends it and vLLM does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from tailrace.dialects.fields import ChatMessage, SamplingFields, read_messages, sampling_of, unknown_in_messages
from tailrace.dialects.native import encode_error
from tailrace.dialects.openai_chunks import ChatEncoder, TextEncoder
from tailrace.dialects.wire import Call, Encoder, JsonBody, StreamFacts, read_fields, refuse, to_json
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.types import GenerateRequest, Message

__all__ = ["encode_error", "encode_models", "parse_chat", "parse_completion"]

_DEFAULT_COMPLETION_TOKENS = 16  # what OpenAI's reference says
_NOT_YET: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "web_search_options": (),
}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(SamplingFields, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class ChatBody(_Body, kw_only=True):
    messages: list[ChatMessage]
    logprobs: bool | None = None


class CompletionBody(_Body, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None


@dataclass(frozen=True, slots=True)
class _ChatView:
    include_usage: bool
    n: int
    logprobs: bool
    media_type = "text/event-stream; charset=utf-8"

    def open(self, facts: StreamFacts) -> Encoder:
        return ChatEncoder(facts, include_usage=self.include_usage, n=self.n, logprobs=self.logprobs)


@dataclass(frozen=True, slots=True)
class _TextView:
    include_usage: bool
    n: int
    logprobs: bool
    media_type = "text/event-stream; charset=utf-8"

    def open(self, facts: StreamFacts) -> Encoder:
        return TextEncoder(facts, include_usage=self.include_usage, n=self.n, logprobs=self.logprobs)


def parse_chat(body: JsonBody) -> Call:
    """Raises: RequestError."""
    fields, ignored = read_fields(body, ChatBody)
    refuse(body, _NOT_YET)
    logprobs = bool(fields.logprobs)
    request = GenerateRequest(
        model=fields.model,
        messages=tuple(_as_template_knows(message) for message in read_messages(fields.messages)),
        sampling=sampling_of(fields, logprobs=logprobs),
    )
    view = _ChatView(_include_usage(fields), request.sampling.n, logprobs)
    return Call(request, view, bool(fields.stream), _unknown(ignored) + unknown_in_messages(body))


def parse_completion(body: JsonBody) -> Call:
    """Raises: RequestError."""
    fields, ignored = read_fields(body, CompletionBody)
    refuse(body, _NOT_YET)
    prompt = fields.prompt
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], str):
            raise UnsupportedParameter(
                "prompt must be one string; lists and token ids are not supported.", param="prompt"
            )
        prompt = prompt[0]
    if not prompt:
        raise RequestError("The prompt is empty.", param="prompt")
    if fields.logprobs:
        raise UnsupportedParameter("logprobs above 0 asks for alternatives, which are not supported.", param="logprobs")
    logprobs = fields.logprobs is not None
    sampling = sampling_of(fields, logprobs=logprobs, default_max_tokens=_DEFAULT_COMPLETION_TOKENS)
    request = GenerateRequest(model=fields.model, prompt=prompt, sampling=sampling)
    return Call(
        request, _TextView(_include_usage(fields), sampling.n, logprobs), bool(fields.stream), _unknown(ignored)
    )


def _include_usage(fields: _Body) -> bool:
    if fields.stream_options is None:
        return False
    if not fields.stream:
        raise RequestError("stream_options is only allowed with stream.", param="stream_options")
    return bool(fields.stream_options.include_usage)


def _unknown(ignored: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in ignored if name not in _NOT_YET)


def _as_template_knows(message: Message) -> Message:
    return Message("system", message.content) if message.role == "developer" else message


def encode_models(names: Sequence[str], created_s: int) -> bytes:
    """The list at `/v1/models`."""
    return to_json({"object": "list", "data": [encode_model(name, created_s) for name in names]})


def encode_model(name: str, created_s: int) -> JsonBody:
    return {"id": name, "object": "model", "created": created_s, "owned_by": "tailrace"}
