"""The APIs of docs/compatibility.md: their fields, and a sample value with an effect for each field.

The fields are those of the wire and those of its official client, if there is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaMessageParams
from anthropic.types.message_count_tokens_params import MessageCountTokensParams as CountParams
from anthropic.types.message_create_params import MessageCreateParamsBase as MessageParams
from anthropic.types.model_list_params import ModelListParams
from anthropic.types.output_config_param import OutputConfigParam
from ollama._types import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, Options
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams as EmbeddingParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams
from tests.described_api import ANY, Api, Value, as_it_is, fields_of
from tests.plugins.front_ends import described as front_ends

from tailrace.dialects import embeddings, native, openai, rerank
from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.fields import SamplingFields
from tailrace_outer.responses import responses_wire
from tailrace_plugins.anthropic import anthropic_wire as anthropic
from tailrace_plugins.articles import cumulative
from tailrace_plugins.llama_server import llama_server_vectors
from tailrace_plugins.llama_server import llama_server_wire as llama_server
from tailrace_plugins.ollama import ollama_embeddings
from tailrace_plugins.ollama import ollama_wire as ollama
from tailrace_plugins.tei import tei_wire as tei
from tailrace_plugins.tgi import tgi_tokenize
from tailrace_plugins.tgi import tgi_wire as tgi
from tailrace_plugins.triton import triton_wire as triton

__all__ = ["APIS"]

_TEI_CUTS = ("prompt_name", "truncate", "truncation_direction")

_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
_SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}

_SAMPLING: dict[str, Value] = {
    "allowed_token_ids": [5], "bad_words": ["x"], "min_tokens": 5, "prompt_logprobs": 2,
    "skip_special_tokens": False, "stop_token_ids": [5],
    "frequency_penalty": 0.5, "guided_choice": ["a"], "guided_grammar": "root ::= x", "guided_json": _SCHEMA,
    "guided_regex": "a", "ignore_eos": True, "include_stop_str_in_output": True, "json_schema": _SCHEMA,
    "logit_bias": {"5": 1}, "n_predict": 7, "repeat_penalty": 1.2,
    "max_completion_tokens": 7, "max_tokens": 7, "min_p": 0.1, "model": "default", "n": 2, "presence_penalty": 0.5,
    "repetition_penalty": 1.2, "chat_template_kwargs": {"enable_thinking": False},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}, "seed": 7,
    "return_progress": True, "stop": ["x"], "stream": True, "stream_options": {"include_usage": True},
    "stream_options.continuous_usage_stats": True, "stream_options.include_obfuscation": False,
    "stream_options.include_usage": True, "structured_outputs": {"choice": ["a"]}, "temperature": 0.5, "top_k": 5,
    "top_p": 0.5, "truncate_prompt_tokens": 5,
    "typical_p": 0.5,
}  # fmt: skip
_STREAMED: dict[str, JsonBody] = {
    "return_progress": {"stream": True},
    "stream_options": {"stream": True},
    "stream_options.include_usage": {"stream": True},
    "stream_options.include_obfuscation": {"stream": True},
    "stream_options.continuous_usage_stats": {"stream": True, "stream_options": {"include_usage": True}},
}
# vLLM's additions to OpenAI's fields.
_VLLM = ["allowed_token_ids", "bad_words", "chat_template", "chat_template_kwargs", "guided_choice", "guided_grammar",
         "guided_json", "guided_regex", "ignore_eos", "include_stop_str_in_output", "length_penalty", "min_p",
         "min_tokens", "priority", "prompt_logprobs", "repetition_penalty", "request_id", "skip_special_tokens",
         "spaces_between_special_tokens", "stop_token_ids", "stream_options.continuous_usage_stats",
         "stream_options.include_obfuscation", "stream_options.include_usage", "structured_outputs", "top_k",
         "truncate_prompt_tokens", "use_beam_search"]  # fmt: skip

_TGI: dict[str, Value] = {
    "adapter_id": "a", "best_of": 2, "decoder_input_details": True, "details": True, "do_sample": True,
    "frequency_penalty": 0.5, "grammar": {"type": "json", "value": _SCHEMA}, "max_new_tokens": 7,
    "repetition_penalty": 1.2, "return_full_text": True, "seed": 7, "stop": ["x"], "temperature": 0.5, "top_k": 5,
    "top_n_tokens": 2, "top_p": 0.5, "truncate": 5, "typical_p": 0.5, "watermark": True,
}  # fmt: skip


def _tgi(door: str, *, full_text: bool = False, **more: Any) -> Api:  # Any: of an Api's fields
    asked = {f"parameters.{name}": value for name, value in _TGI.items()}
    return Api(
        "Text Generation Inference",
        door,
        {"inputs": "Hi", "parameters": {}},
        fields_of(tgi.TgiBody, "parameters") | set(asked) | {"parameters.*"},
        {"inputs": "Ho", "stream": True, **asked, "parameters.return_full_text": not full_text},
        {"parameters.best_of": {"parameters": {"do_sample": True}}, "parameters.seed": {"parameters": {"top_k": 3}}},
        **more,
    )


_SEVERAL = "it matters only with several models"
_SAID = "the path decides whether it streams"
_USER = {"role": "user", "content": "Hi"}
_OTHER_USER = {"role": "user", "content": "Ho"}

_NATIVE_SAMPLES = _SAMPLING | {
    "continuity": "exact", "max_reasoning_tokens": 5,
    "best_of": 2, "functions": [_TOOL], "id": "mine", "linger_s": 5, "logprobs": True, "messages": [_OTHER_USER],
    "on_disconnect": "cancel", "prompt": "Ho", "reasoning": "text", "tools": [_TOOL], "top_logprobs": 2,
}  # fmt: skip
_NATIVE_FIELDS = fields_of(native.NativeBody) | set(native.WIRE.unused)

_ANTHROPIC_TOOL = {"name": "look", "input_schema": {"type": "object"}}
_ANTHROPIC_SAMPLES: dict[str, Value] = {
    "max_tokens": 7, "messages": [_OTHER_USER], "model": "default",
    "output_config.format": {"type": "json_schema", "schema": _SCHEMA}, "stop_sequences": ["x"], "stream": True,
    "system": "Be kind.", "temperature": 0.5, "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tool_choice": {"type": "none"}, "tool_choice.disable_parallel_tool_use": True, "tools": [_ANTHROPIC_TOOL],
    "top_k": 5, "top_p": 0.5, "cache_control": {"type": "ephemeral"}, "output_config.effort": "low",
    "output_format": {"type": "json_schema", "schema": _SCHEMA},
}  # fmt: skip
_CACHED = "prefixes are cached anyway"
_ANTHROPIC_COMPANIONS: dict[str, JsonBody] = {
    "thinking": {"max_tokens": 2048},
    "tool_choice": {"tools": [_ANTHROPIC_TOOL]},
    "tool_choice.disable_parallel_tool_use": {"tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "auto"}},
}
# The beta's `betas` is a header.
_ANTHROPIC_FIELDS = {*MessageParams.__annotations__, *BetaMessageParams.__annotations__} - {"betas", "output_config"}
_IN_CONFIG = {f"output_config.{name}" for name in OutputConfigParam.__annotations__}

_LLAMA_SAMPLES: dict[str, Value] = _SAMPLING | {
    "cache_prompt": False, "grammar": "root ::= x", "id_slot": 2, "image_data": [1], "input_extra": [{"text": "x"}],
    "input_prefix": "b", "input_suffix": "y", "lora": [1], "min_keep": 1, "mirostat": 1, "multimodal_data": ["x"],
    "n_cache_reuse": 1, "n_discard": 1, "n_indent": 1, "n_keep": 1, "n_probs": 1, "prompt": "c",
    "post_sampling_probs": True, "response_fields": ["content"], "return_tokens": True, "samplers": ["top_k"],
    "t_max_predict_ms": 5, "t_max_prompt_ms": 5, "timings_per_token": True,
}  # fmt: skip
_OLLAMA_SAMPLES: dict[str, Value] = {
    "context": [1, 2], "format": "json", "images": ["aGk="], "logprobs": True, "messages": [_OTHER_USER],
    "model": "other", "prompt": "Ho", "raw": True, "shift": True, "stream": False, "suffix": "x", "system": "Be kind.",
    "template": "x", "think": True, "tools": [_TOOL], "top_logprobs": 2, "truncate": True,
    "options.frequency_penalty": 0.5,
    "options.min_p": 0.1, "options.mirostat": 1, "options.num_predict": 7, "options.penalize_newline": False,
    "options.presence_penalty": 0.5, "options.repeat_last_n": 32, "options.repeat_penalty": 1.2, "options.seed": 7,
    "options.stop": ["x"], "options.temperature": 0.5, "options.tfs_z": 0.5, "options.top_k": 5, "options.top_p": 0.5,
    "options.typical_p": 0.5,
}  # fmt: skip
_IN_OPTIONS = {f"options.{name}" for name in Options.model_fields} | {"options.*"}


_NOTHING_IS_DROPPED = "a prompt that is too long is an error, and a long answer ends with the window"


def _ollama(door: str, base: JsonBody, theirs: Iterable[str], body: type[msgspec.Struct]) -> Api:
    return Api(
        "Ollama",
        door,
        {"model": "scripted", **base},
        ({*theirs} - {"options"}) | _IN_OPTIONS | fields_of(body, "options") | set(ollama.WIRE.unused),
        _OLLAMA_SAMPLES,
        {"top_logprobs": {"logprobs": True}},
        {"shift": _NOTHING_IS_DROPPED, "truncate": _NOTHING_IS_DROPPED},
    )


_TRITON_SAMPLES = _SAMPLING | {
    "TEXT": "Ho", "bad_words": "x", "beam_width": 2, "exclude_input_in_output": False, "id": "mine", "image": "x",
    "max_new_tokens": 7, "outputs": [{"name": "OUT"}], "outputs[].parameters.binary_data": True,
    "outputs[].parameters.classification": 3, "outputs[].parameters.shared_memory_region": "x", "prompt": "Ho",
    "return_log_probs": True, "sampling_parameters": '{"temperature": 0.5}', "stop": "x", "stop_words": "x",
    "text_input": "Ho",
}  # fmt: skip
_DATATYPES = {str: "BYTES", bool: "BOOL", int: "INT32", float: "FP32"}
_AROUND = ("id", "outputs")  # stand beside the inputs, wherever those are
_OF_OUTPUTS = [f"outputs[].parameters.{name}" for name in ("binary_data", "classification", "shared_memory_region")]


def _as_tensors(given: JsonBody) -> JsonBody:
    inputs = {name: value for name, value in given.items() if name not in _AROUND}
    tensors = [
        {"name": name, "shape": [1], "datatype": _DATATYPES.get(type(value), "BYTES"), "data": [value]}
        for name, value in inputs.items()
    ]
    return {name: given[name] for name in _AROUND if name in given} | {"inputs": tensors}


def _as_parameters(given: JsonBody) -> JsonBody:
    inputs = {name: value for name, value in given.items() if name not in _AROUND}
    return {name: given[name] for name in _AROUND if name in given} | {"parameters": inputs}


def _triton(verb: str) -> list[Api]:
    forms = [
        (_as_tensors, "as tensors in `inputs`"),
        (_as_parameters, "inside of `parameters`"),
        (as_it_is, "beside each other"),
    ]
    return [
        Api(
            "Triton, KServe v2 and Inferless",
            f"POST /v2/models/{{model}}/{verb}",
            {"TEXT": "Hi"},
            fields_of(triton.Inputs) | set(triton.WIRE.unused) | set(_AROUND) | set(_OF_OUTPUTS),
            _TRITON_SAMPLES
            | dict.fromkeys(("end_id", "min_length", "n", "pad_id", "priority", "sequence_id", "timeout"), 5)
            | {
                name: True
                for name in triton.WIRE.unused
                if name.startswith(("return_", "sequence_start", "sequence_end"))
            }
            | {"length_penalty": 0.5, "lora_name": "x", "stream": verb != "generate_stream"},
            {"prompt": {"TEXT": None}, "text_input": {"TEXT": None}}
            | {name: {"outputs": [{"name": "OUT"}]} for name in _OF_OUTPUTS},
            {"outputs": "there is only one output, and other names are refused"},
            form,
            note,
        )
        for form, note in forms
    ]


APIS = [
    Api(
        "OpenAI",
        "POST /v1/embeddings",
        {"input": "Hi"},
        fields_of(embeddings.EmbeddingsBody) | set(EmbeddingParams.__annotations__),
        {"dimensions": 3, "encoding_format": "base64", "input": ["Ho"], "model": "other", "user": "me"},
        moot={"model": "the routes choose the model"},
    ),
    *(
        Api(
            "Jina and Cohere",
            f"POST /{version}/rerank",
            {"query": "Hi", "documents": ["Ho"]},
            fields_of(rerank.RerankBody) | {"max_tokens_per_doc"},
            {
                "documents": ["Hu"],
                "model": "other",
                "query": "Ho",
                "return_documents": True,
                "top_n": 1,
                "rank_fields": ["a"],
            }
            | dict.fromkeys(("max_chunks_per_doc", "max_tokens_per_doc", "priority"), 5),
            moot={"model": "the routes choose the model"},
        )
        for version in ("v1", "v2")
    ),
    Api(
        "Text Embeddings Inference",
        "POST /embed",
        {"inputs": "Hi"},
        fields_of(tei.EmbedInputsBody) | {"prompt_name"},
        {
            "dimensions": 3,
            "inputs": ["Ho"],
            "normalize": False,
            "prompt_name": "x",
            "truncate": True,
            "truncation_direction": "Left",
        },
        {"truncation_direction": {"truncate": True}},
    ),
    Api(
        "Text Embeddings Inference",
        "POST /similarity",
        {"inputs": {"source_sentence": "Hi", "sentences": ["Ho"]}},
        {"inputs.sentences", "inputs.source_sentence", *(f"parameters.{name}" for name in _TEI_CUTS)},
        {
            "inputs.sentences": ["Hu"],
            "inputs.source_sentence": "Hu",
            "parameters.prompt_name": "x",
            "parameters.truncate": True,
            "parameters.truncation_direction": "Left",
        },
        {"parameters.truncation_direction": {"parameters": {"truncate": True}}},
    ),
    Api(
        "Text Embeddings Inference",
        "POST /rerank",
        {"query": "Hi", "texts": ["Ho"]},
        fields_of(tei.RerankTextsBody) | {"prompt_name"},
        {
            "prompt_name": "x",
            "query": "Ho",
            "raw_scores": True,
            "return_text": True,
            "texts": ["Hu"],
            "truncate": True,
            "truncation_direction": "Left",
        },
        {"truncation_direction": {"truncate": True}},
    ),
    Api(
        "Ollama",
        "POST /api/embed",
        {"model": "scripted", "input": "Hi"},
        fields_of(ollama_embeddings.EmbedBody) | set(EmbedRequest.model_fields),
        {
            "dimensions": 3,
            "input": ["Ho"],
            "keep_alive": "5m",
            "model": "other",
            "options": {"num_ctx": 5},
            "truncate": False,
        },
    ),
    Api(
        "Ollama",
        "POST /api/embeddings",
        {"model": "scripted", "prompt": "Hi"},
        fields_of(ollama_embeddings.OldEmbeddingsBody) | set(EmbeddingsRequest.model_fields),
        {"keep_alive": "5m", "model": "other", "options": {"num_ctx": 5}, "prompt": "Ho"},
        moot={"model": "the routes choose the model"},
    ),
    Api(
        "tailrace",
        "POST /v1/streams",
        {"messages": [_USER]},
        _NATIVE_FIELDS,
        _NATIVE_SAMPLES,
        {"prompt": {"messages": None}},
    ),
    Api(
        "tailrace",
        "create /v1/ws",
        {"messages": [_USER]},
        _NATIVE_FIELDS | {"id"},
        _NATIVE_SAMPLES,
        {"prompt": {"messages": None}},
    ),
    Api(
        "tailrace",
        "GET /v1/streams/{stream_id}/events",
        {},
        ["after", "return_progress"],
        {"after": "5", "return_progress": "true"},
        in_query=True,
    ),
    Api(
        "OpenAI and vLLM: chat completions",
        "POST /v1/chat/completions",
        {"messages": [_USER]},
        {*ChatParams.__annotations__, *_VLLM, *openai.WIRE.unused, "stream"} | fields_of(openai.OpenAIChatBody),
        _SAMPLING
        | {
            "conversation": "conv_known",
            "function_call": {"name": "look"},
            "functions": [_TOOL["function"]],
            "logprobs": True,
            "messages": [_OTHER_USER],
            "tool_choice": "required",
            "tools": [_TOOL],
            "top_logprobs": 2,
            "parallel_tool_calls": False,
            "include_reasoning": False,
            "reasoning_effort": "low",
            "reasoning": {"effort": "low"},
            "reasoning_format": "none",
            "thinking_budget": 5,
            "thinking_budget_tokens": 5,
            "thinking_token_budget": 5,
        },
        _STREAMED
        | {
            "function_call": {"functions": [_TOOL["function"]]},
            "parallel_tool_calls": {"tools": [_TOOL]},
            "tool_choice": {"tools": [_TOOL]},
            "top_logprobs": {"logprobs": True},
        },
    ),
    Api(
        "OpenAI and vLLM: completions",
        "POST /v1/completions",
        {"prompt": "Hi"},
        {*CompletionParams.__annotations__, *_VLLM, *openai.WIRE.unused} | fields_of(openai.CompletionBody),
        _SAMPLING | {"echo": True, "logprobs": 2, "prompt": ["Ho", "Ha"], "best_of": 2, "suffix": "x"},
        _STREAMED,
    ),
    Api(
        "OpenAI and vLLM: completions",
        "POST /v1/fim/completions",
        {"prompt": "Hi"},
        {*CompletionParams.__annotations__, *_VLLM, *openai.WIRE.unused} | fields_of(openai.FimBody),
        {**_SAMPLING, "random_seed": 9, "echo": True, "logprobs": 2, "prompt": ["Ho"], "best_of": 2, "suffix": "x"},
        _STREAMED,
    ),
    Api(
        "OpenAI: responses",
        "POST /v1/responses",
        {"input": "Hi"},
        {*ResponseParams.__annotations__, "stream"}
        | fields_of(responses_wire.ResponsesBody)
        | set(responses_wire.WIRE.unused),
        _SAMPLING
        | {
            "background": True,
            "conversation": "conv_known",
            "generate": False,
            "include": ["message.output_text.logprobs"],
            "input": [_OTHER_USER],
            "instructions": "Be kind.",
            "max_output_tokens": 7,
            "metadata": {"a": "b"},
            "parallel_tool_calls": False,
            "previous_response_id": "resp_known",
            "reasoning": {"effort": "low"},
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
        "OpenAI: responses",
        "GET /v1/responses/{response_id}",
        {},
        ["stream", "starting_after"],
        {"stream": "true", "starting_after": "5"},
        {"starting_after": {"stream": "true"}},
        in_query=True,
    ),
    Api(
        "OpenAI: models",
        "GET /v1/models",
        {},
        ["client_version"],
        {"client_version": "0.169.0"},
        in_query=True,
    ),
    Api(
        "Anthropic",
        "POST /v1/messages",
        {"model": "scripted", "max_tokens": 9, "messages": [_USER]},
        _ANTHROPIC_FIELDS
        | _IN_CONFIG
        | fields_of(anthropic.MessagesBody, "output_config")
        | set(anthropic.WIRE.unused)
        | {"tool_choice.disable_parallel_tool_use"},
        _ANTHROPIC_SAMPLES,
        _ANTHROPIC_COMPANIONS,
        {"cache_control": _CACHED},
    ),
    Api(
        "Anthropic",
        "POST /v1/messages/count_tokens",
        {"model": "scripted", "messages": [_USER]},
        ({*CountParams.__annotations__} - {"output_config"})
        | _IN_CONFIG
        | fields_of(anthropic.CountBody, "output_config")
        | set(anthropic.WIRE.unused),
        _ANTHROPIC_SAMPLES,
        {name: beside for name, beside in _ANTHROPIC_COMPANIONS.items() if name != "thinking"},
        {ANY: "it does not change how many tokens the prompt has"},
    ),
    Api(
        "Anthropic",
        "GET /v1/models",
        {},
        {*ModelListParams.__annotations__} - {"workspace_id"},  # which is a header
        {"after_id": "scripted", "before_id": "other", "limit": "1", "lifecycle": "active"},
        in_query=True,
        headers={"anthropic-version": "2023-06-01"},
    ),
    _ollama("POST /api/chat", {"messages": [_USER]}, ChatRequest.model_fields, ollama.OllamaChatBody),
    _ollama("POST /api/generate", {"prompt": "Hi"}, GenerateRequest.model_fields, ollama.OllamaGenerateBody),
    Api(
        "Ollama",
        "POST /api/pull",
        {"model": "scripted"},
        ["insecure", "model", "name", "stream"],
        {"model": "default", "name": "scripted", "stream": False, "insecure": True},
        {"name": {"model": None}},
        {
            "insecure": "nothing is fetched",
            "model": "the answer is the same for every name of the model",
        },
    ),
    Api(
        "Ollama",
        "POST /api/show",
        {"model": "scripted"},
        ["model", "name", "verbose"],
        {"model": "scripted", "name": "scripted", "verbose": True},
        {"model": {"model": None}, "name": {"model": None}},
        {"verbose": "there are no more details"},
    ),
    *(api for verb in ("infer", "generate", "generate_stream") for api in _triton(verb)),
    _tgi("POST /generate", moot={"stream": _SAID}),
    _tgi("POST /generate_stream", moot={"stream": _SAID}),
    _tgi("POST /", full_text=True),
    Api(
        "Text Generation Inference",
        "POST /tokenize",
        {"inputs": "Hi"},
        fields_of(tgi_tokenize.TokenizeBody),
        {
            "add_special": True,
            "add_special_tokens": False,
            "content": "Ho",
            "inputs": "Ho",
            "messages": [_OTHER_USER],
            "model": "other",
            "parameters": {"truncate": 1},
            "prompt": "Ho",
            "stream": True,
        },
        {
            "add_special": {"inputs": None, "content": "Hi"},
            "add_special_tokens": {"inputs": None, "prompt": "Hi"},
            "content": {"inputs": None},
            "messages": {"inputs": None},
            "model": {"inputs": None, "prompt": "Hi"},
            "prompt": {"inputs": None},
        },
        moot={ANY: "nothing is generated", "model": _SEVERAL},
    ),
    Api(
        "Text Generation Inference",
        "POST /chat_tokenize",
        {"messages": [_USER]},
        fields_of(tgi_tokenize.TgiChatBody),
        {"messages": [_OTHER_USER]},
        moot={ANY: "nothing is generated"},
    ),
    Api(
        "llama.cpp's server",
        "POST /infill",
        {"input_prefix": "a", "input_suffix": "z"},
        fields_of(llama_server.InfillBody) | set(llama_server.WIRE.unused),
        _LLAMA_SAMPLES,
    ),
    Api(
        "llama.cpp's server",
        "POST /completion",
        {"prompt": "Hi"},
        fields_of(llama_server.LlamaCompletionBody) | set(llama_server.WIRE.unused),
        _LLAMA_SAMPLES | {"prompt": "Ho"},
    ),
    Api(
        "llama.cpp's server",
        "POST /embedding",
        {"content": "Hi"},
        fields_of(llama_server_vectors.LlamaEmbeddingBody) | {"encoding_format"},
        {"content": ["Ho"], "input": "Hu", "embd_normalize": 1, "encoding_format": "base64", "model": "other"},
        {"input": {"content": None}},
        moot={"model": "the routes choose the model"},
    ),
    Api(
        "llama.cpp's server",
        "POST /detokenize",
        {"tokens": [1]},
        fields_of(llama_server.DetokenizeBody),
        {"tokens": [2], "model": "other"},
        moot={"model": _SEVERAL},
    ),
    Api(
        "llama.cpp's server",
        "POST /apply-template",
        {"messages": [_USER]},
        fields_of(llama_server.TemplateBody),
        {"messages": [_OTHER_USER], "model": "other"},
        moot={"model": _SEVERAL},
    ),
    *front_ends.APIS,
    Api(
        "The vLLM article",
        "POST /generate-stream",
        {"prompt": "Hi"},
        fields_of(cumulative.CumulativeBody) | set(cumulative.WIRE.unused),
        _SAMPLING | {"best_of": 2, "prompt": "Ho", "use_beam_search": True},
    ),
    Api(
        "The vLLM article",
        "GET /generate-stream",
        {"stream_id": "a"},
        ["stream_id"],
        {"stream_id": "b"},
        in_query=True,
    ),
    Api(
        "The FastAPI article",
        "GET /query-stream/",
        {"query": "Hi"},
        ["query", *fields_of(SamplingFields)],
        {"query": "Ho", "max_tokens": "7"},
        in_query=True,
    ),
    Api(
        "Ray Serve's tutorial",
        "POST /",
        {"prompt": "Hi"},
        ["prompt", *fields_of(SamplingFields)],
        {"prompt": "Ho", "max_tokens": "7"},
        in_query=True,
    ),
]
