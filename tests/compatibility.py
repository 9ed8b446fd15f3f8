"""The APIs that docs/compatibility.md is about: which fields they have, and a value of each that asks for something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams

from tailrace.dialects.bodies import JsonBody

__all__ = ["APIS", "Api"]

Value = Any  # Any: of JSON


@dataclass(frozen=True)
class Api:
    title: str
    path: str
    base: JsonBody
    fields: Sequence[str]  # with a dot where they are inside of another
    samples: Mapping[str, Value]
    companions: Mapping[str, JsonBody] = field(default_factory=dict)  # what a field needs beside it


_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
_SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}

_SAMPLING: dict[str, Value] = {
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "logit_bias": {"5": 1},
    "max_completion_tokens": 7,
    "max_tokens": 7,
    "min_p": 0.1,
    "model": "default",
    "n": 2,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.2,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
    "seed": 7,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "stream_options.continuous_usage_stats": True,
    "stream_options.include_obfuscation": False,
    "stream_options.include_usage": True,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "truncate_prompt_tokens": 5,
    "typical_p": 0.5,
}
_STREAMED: dict[str, JsonBody] = {
    "stream_options": {"stream": True},
    "stream_options.include_usage": {"stream": True},
    "stream_options.include_obfuscation": {"stream": True},
    "stream_options.continuous_usage_stats": {"stream": True, "stream_options": {"include_usage": True}},
}
# What vLLM takes beside OpenAI's fields.
_VLLM = ["allowed_token_ids", "bad_words", "chat_template", "chat_template_kwargs", "guided_choice", "guided_grammar",
         "guided_json", "guided_regex", "ignore_eos", "include_stop_str_in_output", "length_penalty", "min_p",
         "min_tokens", "priority", "prompt_logprobs", "repetition_penalty", "request_id", "skip_special_tokens",
         "spaces_between_special_tokens", "stop_token_ids", "stream_options.continuous_usage_stats",
         "stream_options.include_obfuscation", "stream_options.include_usage", "structured_outputs", "top_k",
         "truncate_prompt_tokens", "use_beam_search"]  # fmt: skip

_TGI = {
    "adapter_id": "a",
    "best_of": 2,
    "decoder_input_details": True,
    "details": True,
    "do_sample": True,
    "frequency_penalty": 0.5,
    "grammar": {"type": "json", "value": _SCHEMA},
    "max_new_tokens": 7,
    "repetition_penalty": 1.2,
    "return_full_text": True,
    "seed": 7,
    "stop": ["x"],
    "temperature": 0.5,
    "top_k": 5,
    "top_n_tokens": 2,
    "top_p": 0.5,
    "truncate": 5,
    "typical_p": 0.5,
    "watermark": True,
}

APIS = [
    Api(
        "Text Generation Inference",
        "/generate",
        {"inputs": "Hi", "parameters": {}},
        ["inputs", *(f"parameters.{name}" for name in _TGI)],
        {"inputs": "Ho", **{f"parameters.{name}": value for name, value in _TGI.items()}},
        {"parameters.best_of": {"parameters": {"do_sample": True}}, "parameters.seed": {"parameters": {"top_k": 3}}},
    ),
    Api(
        "OpenAI and vLLM: chat completions",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}]},
        sorted({*ChatParams.__annotations__, *_VLLM, "stream"}),
        _SAMPLING
        | {
            "logprobs": True,
            "messages": [{"role": "user", "content": "Ho"}],
            "tool_choice": "required",
            "tools": [_TOOL],
            "top_logprobs": 2,
            "parallel_tool_calls": False,
        },
        _STREAMED | {"top_logprobs": {"logprobs": True}, "tool_choice": {"tools": [_TOOL]}},
    ),
    Api(
        "OpenAI and vLLM: completions",
        "/v1/completions",
        {"prompt": "Hi"},
        sorted({*CompletionParams.__annotations__, *_VLLM, "stream", "response_format"}),
        _SAMPLING | {"echo": True, "logprobs": 2, "prompt": ["Ho", "Ha"], "best_of": 2},
        _STREAMED,
    ),
    Api(
        "OpenAI: responses",
        "/v1/responses",
        {"input": "Hi"},
        sorted({*ResponseParams.__annotations__, "stream"}),
        _SAMPLING
        | {
            "background": True,
            "include": ["message.output_text.logprobs"],
            "input": [{"role": "user", "content": "Ho"}],
            "instructions": "Be kind.",
            "max_output_tokens": 7,
            "metadata": {"a": "b"},
            "previous_response_id": "resp_known",
            "store": False,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}},
            "tool_choice": "required",
            "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
            "top_logprobs": 2,
            "truncation": "auto",
            "user": "u",
        },
        {**_STREAMED, "tool_choice": {"tools": [{"type": "function", "name": "look"}]}},
    ),
    Api(
        "The vLLM article",
        "/generate-stream",
        {"prompt": "Hi"},
        ["prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n", "best_of"],
        _SAMPLING | {"prompt": "Ho"},
    ),
]
