"""Encodes requests to upstream servers and decodes their answers. Pure functions: no socket, no clock.

Parameters: each kind of server gets only the parameters in `PARAMETERS`; others are refused earlier. `ask` refuses
parameters and grammars that one of the server's routes lacks. Temperature and top_p are always sent, and so are neutral
values where some servers have other defaults. tailrace itself handles `n` and `stop`. Seeds are reduced to 31 bits,
which all servers accept.

Answers: text and tool calls. OpenAI's wire has tool calls in separate fields; they are written into the text in the
form that tailrace parses (`<tool_call>`). Reasoning in separate fields is also written into the text, if it comes
before all text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from tailrace.engines.promise import Sequence
from tailrace.errors import SequenceFailed
from tailrace.models.upstream import Address
from tailrace.text.packed import CHAT_ID, PackedChat, unpack
from tailrace.text.reasoning import THINK
from tailrace.types import FinishReason, Sampling

__all__ = ["PARAMETERS", "AnswerEvent", "UpstreamError", "UpstreamRequest", "ask", "reader", "short"]

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
_LLAMACPP_LAST_TOKENS = 2**16  # window of penalties; the default is 64, and more would allocate memory at once
_REASON_CHARACTERS = 200
_MOST_TOKENS = 2**53
_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "stop_sequence": "stop",
    "eos_token": "stop",
    "length": "length",
}


class UpstreamError(Exception):
    """An upstream failure. The message continues a sentence that begins with the server's name. `is_temporary`: a retry
    may succeed. `is_refusal`: the server rejects the request itself."""

    def __init__(
        self,
        reason: str,
        *,
        is_temporary: bool = False,
        is_refusal: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_temporary = is_temporary
        self.is_refusal = is_refusal
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """One HTTP request, and which format its answer has."""

    url: str
    body: bytes
    is_tgi: bool


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """One event of an answer."""

    text: str = ""
    finish_reason: FinishReason | None = None
    usage: tuple[int, int] | None = None  # tokens of prompt and answer
    is_over: bool = False  # the last event


def ask(address: Address, sequence: Sequence) -> UpstreamRequest:
    """Make the request for a sequence. Raises: SequenceFailed if this server cannot run it."""
    try:
        chat, text = _prompt(sequence.prompt_ids)
    except (ValueError, msgspec.DecodeError):
        raise SequenceFailed("the prompt is not valid text") from None
    sampling = sequence.sampling
    if chat is None and address.kind == "tgi":
        body: dict[str, Any] = {"inputs": text, "parameters": _tgi_parameters(sampling)}  # Any: JSON
        return UpstreamRequest(f"{address.url}/generate_stream", _json(body), is_tgi=True)
    body = {"model": address.model, "stream": True, "stream_options": {"include_usage": True}}
    body |= _sampling_fields(address, sampling)
    if chat is None:
        body |= {"prompt": text} | _grammar_fields(address, sampling, is_chat=False)
        return UpstreamRequest(f"{address.url}/completions", _json(body), is_tgi=False)
    if address.kind == "tgi" and (lacking := _differing(sampling, _TGI_CHATS_LACK)):
        raise SequenceFailed(f"{address.host} does not support {lacking[0]} in chats")
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
    return UpstreamRequest(f"{base}/chat/completions", _json(body), is_tgi=False)


def _prompt(ids: tuple[int, ...]) -> tuple[PackedChat | None, str]:
    """Unpack a chat and the beginning of its answer, or a plain text. Raises: ValueError, msgspec.DecodeError."""
    if not ids or ids[0] != CHAT_ID:
        return None, unpack(ids).decode("utf-8", "replace")
    end = ids.index(CHAT_ID, 1)
    return msgspec.json.decode(unpack(ids[1:end]), type=PackedChat), unpack(ids[end + 1 :]).decode("utf-8", "replace")


def _beginning(address: Address, chat: PackedChat, text: str) -> dict[str, Any]:  # Any: JSON
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


def _tgi_parameters(sampling: Sampling) -> dict[str, Any]:  # Any: JSON
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
    if (grammar := sampling.grammar) is not None:
        is_regex = grammar.kind == "regex"
        value = grammar.source if is_regex else msgspec.json.decode(grammar.source)
        parameters["grammar"] = {"type": "regex" if is_regex else "json", "value": value}
    return parameters


def _grammar_fields(address: Address, sampling: Sampling, *, is_chat: bool) -> dict[str, Any]:  # Any: JSON
    """Return the fields for a grammar. Raises: SequenceFailed."""
    if sampling.grammar is None:
        return {}
    if sampling.grammar.kind == "regex":
        if address.kind == "tailrace":
            return {"guided_regex": sampling.grammar.source}
        if address.kind != "tgi":
            raise SequenceFailed(f"{address.host} supports JSON schemas, but not regular expressions")
        return {"response_format": {"type": "regex", "value": sampling.grammar.source}}
    schema = msgspec.json.decode(sampling.grammar.source)
    if address.kind == "tailrace":
        return {"guided_json": schema}
    if address.kind == "tgi":
        return {"response_format": {"type": "json", "value": schema}}
    if address.kind == "llamacpp" and not is_chat:
        return {"json_schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def _differing(sampling: Sampling, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(sampling, name) != getattr(_DEFAULTS, name)]


def _seed(sampling: Sampling) -> int:
    return (sampling.seed or 0) % 2**31


def _json(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body)


def _counts(prompt: int | None, answer: int | None) -> tuple[int, int] | None:
    """Return the token counts of prompt and answer, or None if they are missing or invalid."""
    if prompt is None or answer is None or not (0 <= prompt < _MOST_TOKENS and 0 <= answer < _MOST_TOKENS):
        return None
    return prompt, answer


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    @property
    def counts(self) -> tuple[int, int] | None:
        return _counts(self.prompt_tokens, self.completion_tokens)


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function
    index: int | None = None
    id: str | None = None


class _Part(msgspec.Struct):
    text: str | None = None


class _Said(msgspec.Struct):
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    reasoning_content: Any = None  # Any: text, from all servers that are known
    reasoning: Any = None  # what some call it

    @property
    def thought(self) -> str:
        return next((one for one in (self.reasoning_content, self.reasoning) if isinstance(one, str)), "")


class _Answer(msgspec.Struct):
    delta: _Said | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Answer] | None = None
    usage: _Usage | None = None
    error: Any = None  # Any: the format differs between servers


class _Token(msgspec.Struct):
    text: str
    special: bool = False


class _Details(msgspec.Struct):
    finish_reason: str
    generated_tokens: int
    input_length: int | None = None


class _TgiEvent(msgspec.Struct):
    token: _Token | None = None
    details: _Details | None = None
    generated_text: str | None = None
    error: Any = None  # Any: usually text
    error_type: str = ""


_read_chunk = msgspec.json.Decoder(_Chunk).decode
_read_tgi = msgspec.json.Decoder(_TgiEvent).decode


class OpenAIReader:
    """Reads the events of one answer of OpenAI's chat or completion route."""

    def __init__(self) -> None:
        self._call: _ToolCall | None = None  # the first part of the current tool call
        self._has_arguments = False
        self._thinks: bool | None = None  # None before the reasoning, False behind it

    def read(self, event: bytes) -> AnswerEvent:
        """Decode an event. Raises: UpstreamError; msgspec.DecodeError if it is not a chunk."""
        if event == b"[DONE]":
            return AnswerEvent(self._close_call(), is_over=True)
        chunk = _read_chunk(event)
        if chunk.error:
            raise _in_band(chunk.error)
        usage = chunk.usage.counts if chunk.usage is not None else None
        if not chunk.choices:
            return AnswerEvent(usage=usage)
        answer = chunk.choices[0]
        said = answer.delta.content if answer.delta is not None else answer.text
        text = "".join(part.text or "" for part in said) if isinstance(said, list) else said or ""
        for call in (answer.delta.tool_calls if answer.delta is not None else None) or ():
            text += self._write(call)
        text = self._think(answer.delta.thought if answer.delta is not None else "", text)
        reason = _finish_reason(answer.finish_reason)
        return AnswerEvent(text + (self._close_call() if reason is not None else ""), reason, usage)

    def _think(self, thought: str, text: str) -> str:
        """The text, behind the reasoning that came before it."""
        written = ""
        if thought and self._thinks is not False:
            written = thought if self._thinks else f"{THINK.opens[0]}\n{thought}"
            self._thinks = True
        if text:
            written += f"\n{THINK.closes[0]}\n\n" if self._thinks else ""
            self._thinks = False
        return written + text

    def _write(self, call: _ToolCall) -> str:
        written = ""
        if self._is_another(call):
            written = self._close_call()
            self._call = call
            name = msgspec.json.encode(call.function.name or "").decode()
            written += f'<tool_call>\n{{"name": {name}, "arguments": '
        arguments = call.function.arguments or ""
        self._has_arguments = self._has_arguments or bool(arguments)
        return written + arguments

    def _is_another(self, call: _ToolCall) -> bool:
        """Return whether a new tool call begins. Some servers omit the index, use one index for all, or repeat the
        id."""
        now = self._call
        if now is None or (call.index is not None and call.index != now.index):
            return True
        return bool(call.id and now.id and call.id != now.id)

    def _close_call(self) -> str:
        if self._call is None:
            return ""
        arguments = "" if self._has_arguments else "{}"
        self._call, self._has_arguments = None, False
        return arguments + "}\n</tool_call>"


class TgiReader:
    """Reads the events of one answer of `/generate_stream`."""

    def read(self, event: bytes) -> AnswerEvent:
        """Decode an event. Raises: UpstreamError; msgspec.DecodeError if it is not valid."""
        said = _read_tgi(event)
        if said.error:
            is_temporary = said.error_type != "validation"
            raise UpstreamError(short(said.error), is_temporary=is_temporary)
        text = said.token.text if said.token is not None and not said.token.special else ""
        details = said.details
        if details is None:
            return AnswerEvent(text)
        usage = _counts(details.input_length, details.generated_tokens)
        return AnswerEvent(text, _finish_reason(details.finish_reason), usage, is_over=True)


def reader(request: UpstreamRequest) -> OpenAIReader | TgiReader:
    return TgiReader() if request.is_tgi else OpenAIReader()


def _finish_reason(said: str | None) -> FinishReason | None:
    """Map a finish reason. Raises: UpstreamError if the server aborted the answer."""
    if not said:
        return None
    if said == "content_filter":
        raise UpstreamError("ended the answer with its content filter")
    if said in ("abort", "error"):  # vLLM, when it shuts down
        raise UpstreamError("aborted the answer", is_temporary=True)
    if said not in _REASONS:
        raise UpstreamError("ended the answer with an unknown finish_reason")
    return _REASONS[said]


def _in_band(error: object) -> UpstreamError:
    """Make an exception of an error event. It is temporary, unless its code is a client error (4xx)."""
    code = error.get("code", error.get("http_status_code")) if isinstance(error, dict) else None
    is_clients = isinstance(code, int) and 400 <= code < 500 and code != 429
    return UpstreamError(short(error), is_temporary=not is_clients)


def short(error: object) -> str:
    """Return a server's error message as one short line without control characters."""
    said = error
    for name in ("error", "message", "detail"):
        if isinstance(said, dict):
            said = said.get(name, said)
    if not isinstance(said, str):
        return "names no reason"
    line = " ".join("".join(char if char.isprintable() else " " for char in said[:4000]).split())
    return f"says: {line[:_REASON_CHARACTERS].rstrip('.')}" if line else "names no reason"
