"""Encodes requests to upstream servers. Pure functions: no socket, no clock.

Each kind of server gets only the parameters in `PARAMETERS`; others are refused earlier. `make_request` refuses
parameters and grammars that one of the server's routes lacks. Neutral values are sent where some servers have other
defaults. tailrace itself handles `n` and `stop`. Seeds are reduced to 31 bits, which all servers accept.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tailrace.engines import Sequence
from tailrace.errors import SequenceFailed
from tailrace.types import Attachment, Grammar, Sampling, Segment
from tailrace_plugins.upstream.upstream_models import Address, infill_url
from tailrace_plugins.upstream.upstream_text import ATTACHMENT, CHAT_ID, ChatBody, unpack

__all__ = ["PARAMETERS", "UpstreamRequest", "make_request"]

_STANDARD = frozenset({"temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty"})
_OF_VLLM = _STANDARD | {"top_k", "min_p", "repetition_penalty", "ignore_eos", "grammar"}
PARAMETERS: dict[str, frozenset[str]] = {
    "openai": _STANDARD,
    "vllm": _OF_VLLM,
    "llamacpp": _OF_VLLM | {"typical_p"},
    "tailrace": _OF_VLLM,  # refuses by itself what its engine lacks
    "tgi": _STANDARD - {"presence_penalty"} | {"top_k", "typical_p", "repetition_penalty", "grammar"},
}
_TGI_CHATS_LACK = ("top_k", "typical_p", "repetition_penalty")
_DEFAULTS = Sampling()
_NOT_EVERYWHERE = {"regex": "regular expressions", "cfg": "other grammars", "tags": "structural tags"}
_LLAMACPP_LAST_TOKENS = 2**16  # window of penalties; the default is 64, and more would allocate memory at once


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """One HTTP request, and which format its answer has."""

    url: str
    body: bytes
    form: Literal["openai", "tgi", "infill"] = "openai"  # infill: that of llama.cpp's `/infill`


def make_request(address: Address, sequence: Sequence) -> UpstreamRequest:
    """Make the request for a sequence. Raises: SequenceFailed if this server cannot run it."""
    try:
        chat, text, after = _prompt(sequence.segments)
    except (ValueError, msgspec.DecodeError):
        raise SequenceFailed("the prompt is not valid text") from None
    sampling = sequence.sampling
    if after and address.kind in ("tgi", "vllm"):
        raise SequenceFailed(f"{address.host} does not support suffix")
    if chat is None and address.kind == "tgi":
        body: dict[str, Any] = {"inputs": text, "parameters": _tgi_parameters(address, sampling)}  # Any: JSON
        return UpstreamRequest(f"{address.url}/generate_stream", _json(body), "tgi")
    body = {"model": address.model, "stream": True, "stream_options": {"include_usage": True}}
    body |= _sampling_fields(address, sampling)
    if address.kind == "llamacpp":
        body["return_progress"] = True
    if chat is None:
        body |= {"prompt": text} | _grammar_fields(address, sampling, is_chat=False)
        if after and address.kind == "llamacpp":
            body |= {"input_prefix": body.pop("prompt"), "input_suffix": after, "n_predict": sampling.max_tokens}
            return UpstreamRequest(infill_url(address.url), _json(body), "infill")
        if after:
            body["suffix"] = after
        return UpstreamRequest(f"{address.url}/completions", _json(body))
    if address.kind == "tgi" and (lacking := _differing(sampling, _TGI_CHATS_LACK)):
        raise SequenceFailed(f"{address.host} does not support {lacking[0]} in chats")
    _put_images(chat, sequence)
    body |= {"messages": chat.messages} | _grammar_fields(address, sampling, is_chat=True)
    if text:
        body |= _beginning(address, chat, text)
    if chat.values:
        if address.kind not in ("llamacpp", "tailrace", "vllm"):
            raise SequenceFailed(f"{address.host} does not support chat_template_kwargs")
        body |= {"chat_template_kwargs": chat.values}
    if chat.tools:
        body |= {"tools": chat.tools}
        if sampling.grammar is not None:
            body["tool_choice"] = "none"  # the grammar forces the call, and tailrace parses it
    if address.is_hosted_openai:
        body["max_completion_tokens"] = body.pop("max_tokens")  # newer models reject the old name
    base = f"{address.url}/v1" if address.kind == "tgi" else address.url
    return UpstreamRequest(f"{base}/chat/completions", _json(body))


def _prompt(segments: Iterable[Segment]) -> tuple[ChatBody | None, str, str]:
    """Return a chat and the beginning of its answer, or None and a text; and the text behind the answer, if it is an
    infill. Token ids are those of the answer so far.

    Raises: ValueError, msgspec.DecodeError, SequenceFailed.
    """
    chat, text, after = None, b"", ""
    for segment in segments:
        if isinstance(segment, Attachment):
            if chat is None:
                raise SequenceFailed("this engine takes images only in a chat")
            continue  # the chat names it
        if isinstance(segment, tuple):
            if segment and segment[0] == CHAT_ID:  # a prompt of an earlier version
                end = segment.index(CHAT_ID, 1)
                chat, segment = msgspec.json.decode(unpack(segment[1:end]), type=ChatBody), segment[end + 1 :]
            text += unpack(segment)
        elif segment.is_chat:
            chat = msgspec.json.decode(segment.text, type=ChatBody)
        else:
            text += segment.text.encode()
            after = segment.after
    return chat, text.decode("utf-8", "replace"), after


def _put_images(chat: ChatBody, sequence: Sequence) -> None:
    """Replace the names of images in a chat with data URLs. Raises: SequenceFailed if an image is missing."""
    urls = {
        ATTACHMENT + one.digest: f"data:{one.media_type};base64,{b64encode(content).decode()}"
        for one, content in zip(
            (one for one in sequence.segments if isinstance(one, Attachment)), sequence.images, strict=True
        )
    }
    for message in chat.messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if part["type"] == "image_url":
                part["image_url"] = {"url": urls[part["image_url"]["url"]]}


def _beginning(address: Address, chat: ChatBody, text: str) -> dict[str, Any]:  # Any: JSON
    """Return the fields that make the server continue the beginning of an answer. Raises: SequenceFailed."""
    if address.kind == "openai":
        raise SequenceFailed(f"{address.host} cannot continue an interrupted answer")
    fields: dict[str, Any] = {"messages": [*chat.messages, {"role": "assistant", "content": text}]}
    if address.kind == "vllm":
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    return fields


def _sampling_fields(address: Address, sampling: Sampling) -> dict[str, Any]:  # Any: JSON
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "seed": _seed(sampling),
    }
    if address.kind != "tgi" or sampling.top_p != _DEFAULTS.top_p:  # TGI rejects the neutral value
        fields["top_p"] = sampling.top_p
    for name in _differing(sampling, ("presence_penalty", "frequency_penalty")):
        fields[name] = getattr(sampling, name)
    if address.kind in ("openai", "tgi"):
        return fields
    fields |= {"top_k": sampling.top_k, "min_p": sampling.min_p}
    if address.kind == "llamacpp":
        fields |= {"repeat_penalty": sampling.repetition_penalty, "typical_p": sampling.typical_p}
        if _differing(sampling, ("repetition_penalty", "presence_penalty", "frequency_penalty")):
            fields["repeat_last_n"] = _LLAMACPP_LAST_TOKENS
    else:
        fields["repetition_penalty"] = sampling.repetition_penalty
    if sampling.ignore_eos:
        fields["ignore_eos"] = True
    return fields


def _tgi_parameters(address: Address, sampling: Sampling) -> dict[str, Any]:  # Any: JSON
    """Raises: SequenceFailed."""
    parameters: dict[str, Any] = {
        "details": True,
        "do_sample": sampling.temperature > 0,
        "max_new_tokens": sampling.max_tokens,
        "seed": _seed(sampling),
    }
    if sampling.temperature > 0:
        parameters["temperature"] = sampling.temperature
    for name in _differing(sampling, ("top_p", "top_k", "typical_p", "repetition_penalty", "frequency_penalty")):
        parameters[name] = getattr(sampling, name)
    if sampling.grammar is not None:
        parameters["grammar"] = _tgi_grammar(address, sampling.grammar)
    return parameters


def _grammar_fields(address: Address, sampling: Sampling, *, is_chat: bool) -> dict[str, Any]:  # Any: JSON
    """Return the fields for a grammar. Raises: SequenceFailed."""
    grammar = sampling.grammar
    if grammar is None:
        return {}
    if address.kind == "tgi":
        return {"response_format": _tgi_grammar(address, grammar)}
    kind, source = grammar.kind, grammar.source
    if kind in ("regex", "cfg") and address.kind in ("tailrace", "vllm"):
        return {"structured_outputs": {"regex" if kind == "regex" else "grammar": source}}
    if kind == "cfg" and address.kind == "llamacpp":
        return {"grammar": source}
    if kind == "tags" and address.kind in ("tailrace", "vllm"):
        return {"response_format": msgspec.json.decode(source) | {"type": "structural_tag"}}
    schema = _schema_of(address, grammar)
    if address.kind == "tailrace":
        return {"guided_json": schema}
    if address.kind == "llamacpp" and not is_chat:
        return {"json_schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def _tgi_grammar(address: Address, grammar: Grammar) -> dict[str, Any]:  # Any: JSON
    """Return a grammar as TGI has it on each of its routes. Raises: SequenceFailed."""
    if grammar.kind == "regex":
        return {"type": "regex", "value": grammar.source}
    return {"type": "json", "value": _schema_of(address, grammar)}


def _schema_of(address: Address, grammar: Grammar) -> Any:  # JSON
    """Raises: SequenceFailed if it is another grammar."""
    if grammar.kind in _NOT_EVERYWHERE:
        raise SequenceFailed(f"{address.host} supports JSON schemas, but not {_NOT_EVERYWHERE[grammar.kind]}")
    return msgspec.json.decode(grammar.source)


def _differing(sampling: Sampling, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(sampling, name) != getattr(_DEFAULTS, name)]


def _seed(sampling: Sampling) -> int:
    return (sampling.seed or 0) % 2**31


def _json(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body)
