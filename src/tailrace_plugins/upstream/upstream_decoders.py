"""Decodes the answers of upstream servers. Pure functions: no socket, no clock.

OpenAI's wire has tool calls in separate fields; they are written into the text in the form that tailrace parses
(`<tool_call>`). Reasoning in separate fields is also written into the text, if it comes before all text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from tailrace.text.reasoning import THINK
from tailrace.types import FinishReason

__all__ = ["AnswerEvent", "InfillDecoder", "OpenAIDecoder", "TgiDecoder", "UpstreamError", "short_reason"]

_REASON_CHARACTERS = 200
_MOST_TOKENS = 2**53
_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "stop_sequence": "stop",
    "eos_token": "stop",
    "length": "length",
    "eos": "stop",  # those of llama.cpp's own routes
    "word": "stop",
    "limit": "length",
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
class AnswerEvent:
    """One event of an answer."""

    text: str = ""
    finish_reason: FinishReason | None = None
    usage: tuple[int, int] | None = None  # tokens of prompt and answer
    num_cached_tokens: int | None = None  # of the prompt; with `usage`, if the server says it
    is_over: bool = False  # the last event
    num_read: tuple[int, int, int] | None = None  # tokens of the prompt: read, of which cached, of all


def _counts(prompt: int | None, answer: int | None) -> tuple[int, int] | None:
    """Return the token counts of prompt and answer, or None if they are missing or invalid."""
    if prompt is None or answer is None or not (0 <= prompt < _MOST_TOKENS and 0 <= answer < _MOST_TOKENS):
        return None
    return prompt, answer


def _cached(count: int | None, num_prompt: int | None) -> int | None:
    """Return the prompt tokens that the server found in its cache; None if it does not say, or the number is wrong."""
    return count if count is not None and 0 <= count <= (num_prompt or 0) else None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def counts(self) -> tuple[int, int] | None:
        return _counts(self.prompt_tokens, self.completion_tokens)

    @property
    def num_cached_tokens(self) -> int | None:
        count = self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details is not None else None
        return _cached(count, self.prompt_tokens)


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function
    index: int | None = None
    id: str | None = None


class _Part(msgspec.Struct):
    text: str | None = None


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    reasoning_content: Any = None  # Any: text, from all servers that are known
    reasoning: Any = None  # another name for it, of some servers

    @property
    def thinking(self) -> str:
        return next((one for one in (self.reasoning_content, self.reasoning) if isinstance(one, str)), "")


class _Answer(msgspec.Struct):
    delta: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Progress(msgspec.Struct):
    """llama.cpp's. Counts tokens of the prompt."""

    total: int
    cache: int
    processed: int  # includes the cached ones

    @property
    def counts(self) -> tuple[int, int, int] | None:
        """Those read, of which cached, of all; None if they are wrong."""
        is_right = 0 <= self.cache <= self.processed <= self.total < _MOST_TOKENS
        return (self.processed, self.cache, self.total) if is_right else None


class _Chunk(msgspec.Struct):
    choices: list[_Answer] | None = None
    prompt_progress: _Progress | None = None
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
    error: Any = None  # Any: usually text
    error_type: str = ""


class _Timings(msgspec.Struct):
    cache_n: int | None = None


class _InfillEvent(msgspec.Struct):
    content: str = ""
    stop: bool = False
    stop_type: str = ""
    tokens_evaluated: int | None = None
    tokens_predicted: int | None = None
    timings: _Timings | None = None
    prompt_progress: _Progress | None = None
    error: Any = None  # Any: as in a chunk


_decode_infill = msgspec.json.Decoder(_InfillEvent).decode
_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_tgi = msgspec.json.Decoder(_TgiEvent).decode


class OpenAIDecoder:
    """Decodes the events of one answer of OpenAI's chat or completion route."""

    def __init__(self) -> None:
        self._call: _ToolCall | None = None  # the first part of the current tool call
        self._has_arguments = False
        self._thinks: bool | None = None  # None before the reasoning, False after it

    def decode(self, event: bytes) -> AnswerEvent:
        """Decode an event. Raises: UpstreamError; msgspec.DecodeError if it is not a chunk."""
        if event == b"[DONE]":
            return AnswerEvent(self._close_call(), is_over=True)
        chunk = _decode_chunk(event)
        if chunk.error:
            raise _error_in_stream(chunk.error)
        if chunk.prompt_progress is not None:
            return AnswerEvent(num_read=chunk.prompt_progress.counts)
        usage = chunk.usage.counts if chunk.usage is not None else None
        num_cached = chunk.usage.num_cached_tokens if chunk.usage is not None else None
        if not chunk.choices:
            return AnswerEvent(usage=usage, num_cached_tokens=num_cached)
        answer = chunk.choices[0]
        content = answer.delta.content if answer.delta is not None else answer.text
        text = "".join(part.text or "" for part in content) if isinstance(content, list) else content or ""
        for call in (answer.delta.tool_calls if answer.delta is not None else None) or ():
            text += self._write(call)
        text = self._think(answer.delta.thinking if answer.delta is not None else "", text)
        reason = _finish_reason(answer.finish_reason)
        return AnswerEvent(text + (self._close_call() if reason is not None else ""), reason, usage, num_cached)

    def _think(self, thought: str, text: str) -> str:
        """Return the text, after the reasoning that came with it or before it."""
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


class TgiDecoder:
    """Decodes the events of one answer of `/generate_stream`."""

    def decode(self, event: bytes) -> AnswerEvent:
        """Decode an event. Raises: UpstreamError; msgspec.DecodeError if it is not valid."""
        message = _decode_tgi(event)
        if message.error:
            is_temporary = message.error_type != "validation"
            raise UpstreamError(short_reason(message.error), is_temporary=is_temporary)
        text = message.token.text if message.token is not None and not message.token.special else ""
        details = message.details
        if details is None:
            return AnswerEvent(text)
        usage = _counts(details.input_length, details.generated_tokens)
        return AnswerEvent(text, _finish_reason(details.finish_reason), usage, is_over=True)


class InfillDecoder:
    """Decodes the events of one answer of llama.cpp's `/infill`."""

    def decode(self, event: bytes) -> AnswerEvent:
        """Decode an event. Raises: UpstreamError; msgspec.DecodeError if it is not valid."""
        message = _decode_infill(event)
        if message.error:
            raise _error_in_stream(message.error)
        if message.prompt_progress is not None:
            return AnswerEvent(num_read=message.prompt_progress.counts)
        if not message.stop:
            return AnswerEvent(message.content)
        usage = _counts(message.tokens_evaluated, message.tokens_predicted)
        count = message.timings.cache_n if message.timings is not None else None
        num_cached = _cached(count, usage[0]) if usage is not None else None
        return AnswerEvent(message.content, _finish_reason(message.stop_type), usage, num_cached, is_over=True)


def _finish_reason(reason: str | None) -> FinishReason | None:
    """Map a finish reason. Raises: UpstreamError if the server aborted the answer."""
    if not reason:
        return None
    if reason == "content_filter":
        raise UpstreamError("ended the answer with its content filter")
    if reason in ("abort", "error"):  # vLLM, when it shuts down
        raise UpstreamError("aborted the answer", is_temporary=True)
    if reason not in _REASONS:
        raise UpstreamError("ended the answer with an unknown finish_reason")
    return _REASONS[reason]


def _error_in_stream(error: object) -> UpstreamError:
    """Make an exception of an error event. It is temporary, unless its code is a client error (4xx)."""
    code = error.get("code", error.get("http_status_code")) if isinstance(error, dict) else None
    is_clients = isinstance(code, int) and 400 <= code < 500 and code != 429
    return UpstreamError(short_reason(error), is_temporary=not is_clients)


def short_reason(error: object) -> str:
    """Return a server's error message as one short line without control characters."""
    message = error
    for name in ("error", "message", "detail"):
        if isinstance(message, dict):
            message = message.get(name, message)
    if not isinstance(message, str):
        return "names no reason"
    line = " ".join("".join(char if char.isprintable() else " " for char in message[:4000]).split())
    return f"says: {line[:_REASON_CHARACTERS].rstrip('.')}" if line else "names no reason"
