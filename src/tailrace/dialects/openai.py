"""OpenAI's wire: `/v1/chat/completions` and `/v1/completions`, with the fields that vLLM adds. Answers:
`openai_chunks.py`.

Streams are exactly `data: ` and one line of JSON per chunk, ending in `data: [DONE]`, also after an error. There are no
`id:` lines: the official client takes a heartbeat after one for an event without JSON. A failure in the middle is a
frame with `error` (which OpenAI's clients raise) and `error_type` (which Hugging Face's raise).

Divergences, on purpose: 1. A stream that was cancelled ends in an error frame, not in a finish_reason that the API does
not have. 2. In a chat `finish_reason` has a chunk of its own, as OpenAI sends it and vLLM does not. 3. A chat that ends
with an assistant's message is continued from there, as with TGI. 4. A call that was forced ends in `tool_calls`, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from tailrace.dialects.bodies import JsonBody, read_known, to_json
from tailrace.dialects.fields import Messages, SamplingFields, Tokens, read_messages, sampling_of
from tailrace.dialects.grammars import read_response_format
from tailrace.dialects.native import encode_error
from tailrace.dialects.openai_chunks import ChatEncoder, TextEncoder
from tailrace.dialects.structured_outputs import StructuredOutputs, read_structured_outputs
from tailrace.dialects.tools import ChosenTool, Tool, choice_of, choose_tools
from tailrace.dialects.wire import (
    HEARTBEAT,
    SSE,
    Asked,
    Call,
    Encoder,
    Generate,
    Operation,
    Reply,
    ServerFacts,
    Show,
    StreamFacts,
    Wire,
    pick_named,
)
from tailrace.errors import RequestError, UnknownModel, UnsupportedOperation, UnsupportedParameter
from tailrace.types import GenerateRequest, Grammar, TemplateValue

__all__ = [
    "WIRE",
    "StreamOptions",
    "encode_error",
    "parse_chat",
    "parse_completion",
]

_MAX_TEMPLATE_VALUES = 16
_MOST = 2**53
_WORD = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_DEFAULT_COMPLETION_TOKENS = 16  # what OpenAI's reference says
_REFUSED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_grammar": (),
    "length_penalty": (1, 1.0),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_prompt": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
# What one of the two has and the other has not.
_REFUSED_IN_CHATS = _REFUSED | {"echo": (False,)}
_REFUSED_IN_TEXTS = _REFUSED | {
    "chat_template_kwargs": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Body(SamplingFields, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    include_stop_str_in_output: bool | None = None
    response_format: JsonBody | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_choice: list[str] | None = None
    guided_json: JsonBody | str | None = None
    guided_regex: str | None = None
    truncate_prompt_tokens: Tokens | None = None


class ChatBody(_Body, kw_only=True):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, TemplateValue] | None = None


class CompletionBody(_Body, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    echo: bool | None = None


@dataclass(frozen=True, slots=True)
class _View:
    include_usage: bool
    continuous_usage: bool
    logprobs: bool
    media_type = SSE
    heartbeat = HEARTBEAT
    farewell = b""


@dataclass(frozen=True, slots=True)
class _ChatView(_View):
    reads_tools: bool = False
    forced_tool: bool = False
    single_call: bool = False

    def open(self, facts: StreamFacts) -> Encoder:
        return ChatEncoder(facts, self)


@dataclass(frozen=True, slots=True)
class _TextView(_View):
    echo: bool = False

    def open(self, facts: StreamFacts) -> Encoder:
        return TextEncoder(facts, self)


def parse_chat(asked: Asked) -> Call:
    """Raises: RequestError."""
    fields, ignored = read_known(asked.body, ChatBody, _REFUSED_IN_CHATS)
    tools = choose_tools(fields.tools or [], choice_of(fields.tool_choice), asked.server)
    grammar = _grammar(fields)
    if tools.shown and grammar is not None:
        raise RequestError("Tool error: Grammar and tools are mutually exclusive", param="response_format")
    logprobs = bool(fields.logprobs)
    if fields.top_logprobs and not logprobs:
        raise RequestError("top_logprobs goes with logprobs.", param="top_logprobs")
    messages = read_messages(fields.messages)
    request = GenerateRequest(
        model=fields.model,
        messages=messages,
        tools=tools.shown,
        template_values=_template_values(fields.chat_template_kwargs or {}),
        continue_final=messages[-1].role == "assistant" and not messages[-1].tool_calls,
        truncate=fields.truncate_prompt_tokens,
        sampling=sampling_of(
            fields,
            logprobs=logprobs,
            top_logprobs=fields.top_logprobs or 0,
            logit_bias=fields.logit_bias,
            grammar=tools.forced or grammar,
            include_stop=bool(fields.include_stop_str_in_output),
        ),
    )
    view = _ChatView(
        *_usage(fields),
        logprobs,
        reads_tools=bool(tools.shown),
        forced_tool=tools.forced is not None,
        single_call=fields.parallel_tool_calls is False,
    )
    return Call(request, view, bool(fields.stream), ignored + tools.ignored)


def parse_completion(asked: Asked) -> Call:
    """Raises: RequestError."""
    fields, ignored = read_known(asked.body, CompletionBody, _REFUSED_IN_TEXTS)
    if fields.echo and fields.logprobs is not None:
        raise UnsupportedParameter("echo with logprobs is not supported.", param="echo")
    request = GenerateRequest(
        model=fields.model,
        prompts=_prompts(fields.prompt),
        truncate=fields.truncate_prompt_tokens,
        sampling=sampling_of(
            fields,
            logprobs=fields.logprobs is not None,
            top_logprobs=fields.logprobs or 0,
            logit_bias=fields.logit_bias,
            grammar=_grammar(fields),
            include_stop=bool(fields.include_stop_str_in_output),
            default_max_tokens=_DEFAULT_COMPLETION_TOKENS,
        ),
    )
    view = _TextView(*_usage(fields), fields.logprobs is not None, echo=bool(fields.echo))
    return Call(request, view, bool(fields.stream), ignored)


def _template_values(given: dict[str, TemplateValue]) -> dict[str, TemplateValue]:
    """vLLM's name for what a template takes besides messages. Texts are single words: nothing that could become a
    control token. Raises: RequestError."""
    param = "chat_template_kwargs"
    if len(given) > _MAX_TEMPLATE_VALUES:
        raise RequestError(f"{param} has more than {_MAX_TEMPLATE_VALUES} entries.", param=param)
    if not all(_is_plain(value) for value in given.values()):
        raise RequestError(f"{param} takes numbers, true, false, null and single words as values.", param=param)
    return given


def _is_plain(value: TemplateValue) -> bool:
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None
    return value is None or abs(value) < _MOST


def _grammar(fields: _Body) -> Grammar | None:
    """In OpenAI's words, in vLLM's, or in those that vLLM had before. Raises: RequestError."""
    older = StructuredOutputs(json=fields.guided_json, regex=fields.guided_regex, choice=fields.guided_choice)
    grammars = [
        read_response_format(fields.response_format),
        read_structured_outputs(fields.structured_outputs, "structured_outputs."),
        read_structured_outputs(older, "guided_"),
    ]
    given = [grammar for grammar in grammars if grammar is not None]
    if len(given) > 1:
        raise RequestError("response_format and structured_outputs exclude each other.", param="response_format")
    return given[0] if given else None


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    """One prompt or several, each text or token ids. Raises: RequestError."""
    if isinstance(prompt, str):
        prompts: list[str | tuple[int, ...]] = [prompt]
    elif prompt and all(isinstance(one, int) for one in prompt):
        prompts = [tuple(one for one in prompt if isinstance(one, int))]
    elif any(isinstance(one, int) for one in prompt):
        raise RequestError("prompt: token ids and texts cannot be mixed.", param="prompt")
    else:
        prompts = [one if isinstance(one, str) else tuple(one) for one in prompt if not isinstance(one, int)]
    if not prompts or not all(prompts):
        raise RequestError("The prompt is empty.", param="prompt")
    return tuple(prompts)


def _usage(fields: _Body) -> tuple[bool, bool]:
    """Whether usage is wanted at the end of a stream, and with each chunk."""
    options = fields.stream_options
    if options is None:
        return False, False
    if not fields.stream:
        raise RequestError("stream_options is only allowed with stream.", param="stream_options")
    continuous = bool(options.continuous_usage_stats)
    if continuous and not options.include_usage:
        raise RequestError("continuous_usage_stats goes with include_usage.", param="stream_options")
    return bool(options.include_usage), continuous


def list_models(asked: Asked) -> Reply:
    return Reply(to_json({"object": "list", "data": [_model(server) for server in asked.every]}))


def show_model(asked: Asked) -> Reply:
    if asked.path["name"] != asked.server.model:
        raise UnknownModel("There is no such model here.", param="model")
    return Reply(to_json(_model(asked.server)))


def show_version(asked: Asked) -> Reply:
    """As vLLM answers it."""
    return Reply(to_json({"version": asked.server.version}))


def refuse_embeddings(asked: Asked) -> Reply:
    """Raises: UnsupportedOperation."""
    raise UnsupportedOperation("This server generates text only; it has no embeddings.")


def _model(server: ServerFacts) -> JsonBody:
    return {
        "id": server.model,
        "object": "model",
        "created": server.started_s,
        "owned_by": "tailrace",
        "max_model_len": server.max_total_tokens,
    }


_CHAT = {"messages": [{"role": "user", "content": "Tell me a story about dogs."}], "max_tokens": 64, "stream": True}

WIRE = Wire(
    name="openai",
    title="OpenAI: chat and text completions",
    operations=(
        Operation("POST", "/v1/chat/completions", Generate(parse_chat), "Answer a chat.", body=ChatBody, example=_CHAT),
        Operation(
            "POST",
            "/v1/completions",
            Generate(parse_completion),
            "Continue prompts.",
            body=CompletionBody,
            example={"prompt": "The river runs", "max_tokens": 32},
        ),
        Operation("GET", "/v1/models", Show(list_models), "The models that are served."),
        Operation("GET", "/v1/models/{name:path}", Show(show_model), "One of them."),
        Operation("POST", "/v1/embeddings", Show(refuse_embeddings), "Refused: this server generates text only."),
        Operation("GET", "/version", Show(show_version), "The version of the server, as vLLM tells it."),
    ),
    encode_error=encode_error,
    pick=pick_named,
    refused=_REFUSED,
    names={"top_logprobs": "logprobs"},
)
