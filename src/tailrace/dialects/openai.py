"""OpenAI's wire: `/v1/chat/completions` and `/v1/completions`, with the fields that vLLM adds. Answers:
`openai_chunks.py`.

Streams are exactly `data: ` and one line of JSON per chunk, ending in `data: [DONE]`, also after an error. There are no
`id:` lines: after one, the official client would read a heartbeat as an event without JSON. A failure during the stream
is a frame with `error` (raised by OpenAI's clients) and `error_type` (raised by Hugging Face's).

Intended divergences: 1. A cancelled stream ends with an error frame, because the API has no finish_reason for it.
2. In a chat `finish_reason` has its own chunk, as with OpenAI but not with vLLM. 3. A chat whose last message is the
assistant's continues this message, as with TGI. 4. A forced call ends with `tool_calls`, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import msgspec

from tailrace.conversations.items import messages_of
from tailrace.dialects.answers import no_embeddings
from tailrace.dialects.bodies import JsonBody, read_known, to_json
from tailrace.dialects.conversations import ConversationField, in_conversation, open_branch, place_of
from tailrace.dialects.facts import ServerFacts
from tailrace.dialects.fields import (
    Messages,
    SamplingFields,
    TemplateValues,
    Tokens,
    read_messages,
    sampling_of,
    template_values,
)
from tailrace.dialects.grammars import read_response_format
from tailrace.dialects.native import encode_error
from tailrace.dialects.openai_chunks import ChatView, TextView, UsageShown
from tailrace.dialects.reasoning import Effort, effort_values, unread_reasoning
from tailrace.dialects.structured_outputs import StructuredOutputs, read_structured_outputs
from tailrace.dialects.tools import ChosenTool, Tool, choice_of, choose_tools
from tailrace.dialects.wire import Generate, GenerateCall, Operation, ParsedRequest, Reply, Show, Wire, named_model
from tailrace.errors import RequestError, UnknownModel, UnsupportedParameter
from tailrace.types import GenerateRequest, Grammar, Message, Sampling

__all__ = [
    "WIRE",
    "StreamOptions",
    "encode_error",
    "parse_chat",
    "parse_completion",
]

_MAX_BIASED = 300
_REASONING_FIELD = "messages[].reasoning_content"
_DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's reference
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
# Fields that only one of the two has.
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


class OpenAIChatBody(_Body, kw_only=True):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateValues | None = None
    reasoning_effort: Effort | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    include_reasoning: bool | None = None
    conversation: ConversationField = None


class CompletionBody(_Body, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    echo: bool | None = None


def parse_chat(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    fields, ignored = read_known(request.body, OpenAIChatBody, _REFUSED_IN_CHATS)
    is_single = fields.parallel_tool_calls is False
    tools = choose_tools(fields.tools or [], choice_of(fields.tool_choice), request.server)
    grammar = _grammar(fields)
    if tools.shown and grammar is not None:
        raise RequestError("Tool error: Grammar and tools are mutually exclusive", param="response_format")
    if fields.top_logprobs and not fields.logprobs:
        raise RequestError("top_logprobs needs logprobs.", param="top_logprobs")
    branch, before = request.branch, tuple[Message, ...]()
    if branch is not None:
        branch = open_branch(branch, has_input=bool(fields.messages))
        before = messages_of(branch.items)
    messages = read_messages(fields.messages, before)
    continues = messages[-1].role == "assistant" and not messages[-1].tool_calls
    effort = effort_values(request.server, fields.reasoning_effort)
    ignored += unread_reasoning(messages[len(before) :], request.server, continues=continues, name=_REASONING_FIELD)
    if fields.reasoning_effort is not None and not effort:
        ignored += ("reasoning_effort",)
    generate = GenerateRequest(
        model=fields.model,
        messages=messages,
        tools=tools.shown,
        template_values=effort | template_values(fields.chat_template_kwargs),
        continue_final=continues,
        split_reasoning=fields.reasoning_format != "none",
        truncate=fields.truncate_prompt_tokens,
        sampling=replace(
            _sampling(fields),
            logprobs=bool(fields.logprobs),
            top_logprobs=fields.top_logprobs or 0,
            grammar=tools.forced or grammar,
            single_call=is_single and tools.allows_several_calls,
        ),
    )
    view = ChatView(
        usage=_usage(fields),
        logprobs=bool(fields.logprobs),
        reads_tools=bool(tools.shown),
        forced_tool=tools.forced is not None,
        single_call=is_single,
        shows_reasoning=fields.include_reasoning is not False,
    )
    if branch is not None:
        generate = in_conversation(branch, generate, len(before), view)
    return GenerateCall(generate, view, bool(fields.stream), ignored + tools.ignored)


def parse_completion(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    fields, ignored = read_known(request.body, CompletionBody, _REFUSED_IN_TEXTS)
    wants_logprobs = fields.logprobs is not None
    if fields.echo and wants_logprobs:
        raise UnsupportedParameter("echo with logprobs is not supported.", param="echo")
    supported = request.server.parameters
    if fields.logprobs and "logprobs" in supported and "top_logprobs" not in supported:
        raise UnsupportedParameter(
            "This engine has only the logprobs of the chosen tokens: logprobs can be 0.", param="logprobs"
        )
    sampling = _sampling(fields)
    generate = GenerateRequest(
        model=fields.model,
        prompts=_prompts(fields.prompt),
        truncate=fields.truncate_prompt_tokens,
        sampling=replace(
            sampling,
            logprobs=wants_logprobs,
            top_logprobs=fields.logprobs or 0,
            grammar=_grammar(fields),
            max_tokens=sampling.max_tokens or _DEFAULT_COMPLETION_TOKENS,
        ),
    )
    view = TextView(usage=_usage(fields), logprobs=wants_logprobs, echo=bool(fields.echo))
    return GenerateCall(generate, view, bool(fields.stream), ignored)


def _sampling(fields: _Body) -> Sampling:
    """Return the parameters that chats and texts share. Raises: RequestError."""
    bias = fields.logit_bias or {}
    if len(bias) > _MAX_BIASED:
        raise RequestError(f"logit_bias has more than {_MAX_BIASED} entries.", param="logit_bias")
    if not all(name.isascii() and name.isdigit() and len(name) < 10 for name in bias):
        raise RequestError("The names in logit_bias must be token ids.", param="logit_bias")
    if not all(-100 <= value <= 100 for value in bias.values()):
        raise RequestError("The values of logit_bias must be from -100 to 100.", param="logit_bias")
    return replace(
        sampling_of(fields),
        logit_bias=tuple((int(name), value) for name, value in bias.items()),
        include_stop=bool(fields.include_stop_str_in_output),
    )


def _grammar(fields: _Body) -> Grammar | None:
    """Read OpenAI's, vLLM's or vLLM's older fields for a grammar. Raises: RequestError."""
    older = StructuredOutputs(json=fields.guided_json, regex=fields.guided_regex, choice=fields.guided_choice)
    grammars = [
        read_response_format(fields.response_format),
        read_structured_outputs(fields.structured_outputs, "structured_outputs."),
        read_structured_outputs(older, "guided_"),
    ]
    given = [grammar for grammar in grammars if grammar is not None]
    if len(given) > 1:
        raise RequestError("Use only one of response_format and structured_outputs.", param="response_format")
    return given[0] if given else None


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts, each a text or token ids. Raises: RequestError."""
    given = [prompt] if isinstance(prompt, str) else prompt
    ids = tuple(one for one in given if isinstance(one, int))
    if 0 < len(ids) < len(given):
        raise RequestError("prompt: token ids and texts cannot be mixed.", param="prompt")
    texts = (one if isinstance(one, str) else tuple(one) for one in given if not isinstance(one, int))
    prompts: tuple[str | tuple[int, ...], ...] = (ids,) if ids else tuple(texts)
    if not prompts or not all(prompts):
        raise RequestError("The prompt is empty.", param="prompt")
    return prompts


def _usage(fields: _Body) -> UsageShown:
    """Raises: RequestError."""
    options = fields.stream_options
    if options is None:
        return "never"
    if not fields.stream:
        raise RequestError("stream_options is only allowed with stream.", param="stream_options")
    if not options.continuous_usage_stats:
        return "at_end" if options.include_usage else "never"
    if not options.include_usage:
        raise RequestError("continuous_usage_stats needs include_usage.", param="stream_options")
    return "always"


def list_models(request: ParsedRequest) -> Reply:
    return Reply(to_json({"object": "list", "data": [_model(server) for server in request.every]}))


def show_model(request: ParsedRequest) -> Reply:
    if request.path["name"] != request.server.model:
        raise UnknownModel("There is no such model here.", param="model")
    return Reply(to_json(_model(request.server)))


def show_version(request: ParsedRequest) -> Reply:
    """Answer as vLLM does."""
    return Reply(to_json({"version": request.server.version}))


def _model(server: ServerFacts) -> JsonBody:
    return {
        "id": server.model,
        "object": "model",
        "created": server.started_s,
        "owned_by": "tailrace",
        "max_model_len": server.max_total_tokens,
        "state": server.state,
    }


_CHAT = {"messages": [{"role": "user", "content": "Tell me a story about dogs."}], "max_tokens": 64, "stream": True}

WIRE = Wire(
    name="openai",
    title="OpenAI: chat and text completions",
    operations=(
        Operation(
            "POST",
            "/v1/chat/completions",
            Generate(parse_chat, conversation=place_of),
            "Answer a chat.",
            body=OpenAIChatBody,
            example=_CHAT,
        ),
        Operation(
            "POST",
            "/v1/completions",
            Generate(parse_completion),
            "Continue prompts.",
            body=CompletionBody,
            example={"prompt": "The river runs", "max_tokens": 32},
        ),
        Operation("GET", "/v1/models", Show(list_models), "List the models."),
        Operation("GET", "/v1/models/{name:path}", Show(show_model), "Show a model."),
        no_embeddings("/v1/embeddings"),
        Operation("GET", "/version", Show(show_version), "The version of the server, as on vLLM."),
    ),
    encode_error=encode_error,
    find_model=named_model,
    refused=_REFUSED,
    names={"top_logprobs": "logprobs"},
)
