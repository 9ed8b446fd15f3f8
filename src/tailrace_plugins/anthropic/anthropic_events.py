"""Anthropic's answers: named events around blocks of content, whole messages, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.dialects import (
    CallPart,
    Encoder,
    JsonBody,
    StreamFacts,
    ToolCallReader,
    ToolsView,
    WholeCall,
    WholeCallReader,
    conformity_json,
    deltas_by_choice,
    failure_of,
    finished_end,
    quote,
    to_json,
)
from tailrace.errors import ContextLengthExceeded, TailraceError
from tailrace.types import End, Event, Released, TextDelta, Usage

__all__ = ["MessagesEncoder", "MessagesView", "encode_error"]

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_TEXT_BLOCK: JsonBody = {"type": "text", "text": ""}
_EMPTY = {  # deltas by the kind of a block
    "text": '{"type":"text_delta","text":""}',
    "thinking": '{"type":"thinking_delta","thinking":""}',
    "tool_use": '{"type":"input_json_delta","partial_json":""}',
}


@dataclass(frozen=True, slots=True)
class MessagesView(ToolsView):
    shows_thinking: bool = False
    heartbeat = _PING

    def open(self, facts: StreamFacts) -> Encoder:
        return MessagesEncoder(facts, self)


class MessagesEncoder(Encoder):
    """Encodes a stream. A block of content stays open until a block of another kind begins."""

    def __init__(self, facts: StreamFacts, view: MessagesView) -> None:
        self._facts = facts
        self._view = view
        self._reader = view.reader()
        self._has_begun = False
        self._block = -1  # number of the last block
        self._open_kind = ""
        self._stop: JsonBody = {}

    def encode(self, seq: int, event: Event | Released) -> bytes:
        frames = []
        if not isinstance(event, TextDelta):
            if event.status != "done":
                return b"event: error\ndata: " + encode_error(failure_of(event))[1] + b"\n\n"
            frames.append(
                _frame("message_delta", {"delta": self._stop, "usage": _usage(event), **conformity_json(event)})
            )
            frames.append(_frame("message_stop", {}))
            return "".join(frames).encode("ascii")
        if not self._has_begun:
            frames.append(self._start())
        finish = event.finish_reason
        if event.reasoning and self._view.shows_thinking:
            frames.append(self._thinking(event.reasoning))
        if self._reader is None:
            frames.append(self._text(event.text))
        else:
            parts = self._reader.push(event.text) + (self._reader.flush(is_cut=finish == "length") if finish else [])
            frames += [self._text(part) if isinstance(part, str) else self._call(part) for part in parts]
        if finish is not None:
            frames.append(self._close())
            self._stop = _stop_of(event, self._reader, self._reader.num_calls if self._reader is not None else 0)
        return "".join(frames).encode("ascii")

    def beat(self, usual: bytes) -> bytes:
        """Return a ping and an event without content. Claude Code 2.1.197 gives up after five minutes of pings alone.

        So a text block may begin before the first token. If no text follows, it stays empty.
        """
        if self._stop:
            return usual
        if not self._has_begun:
            frame = self._start()
        elif self._open_kind:
            frame = self._delta(_EMPTY[self._open_kind])
        else:
            frame = self._begin(_TEXT_BLOCK)
        return usual + frame.encode("ascii")

    def _start(self) -> str:
        self._has_begun = True
        before = End("done", Usage(self._facts.record.num_prompt_tokens, 0))
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, before)
        return _frame("message_start", {"message": message})

    def whole(self, events: Sequence[Event]) -> bytes:
        end = finished_end(events)
        (deltas,) = deltas_by_choice(events, 1)
        text = "".join(delta.text for delta in deltas)
        reader = WholeCallReader(self._view.calls) if self._view.calls is not None else None
        parts: Sequence[str | WholeCall] = [text]
        if reader is not None:
            parts = reader.push(text) + reader.flush(is_cut=deltas[-1].finish_reason == "length")
        content: list[JsonBody] = []
        thinking = "".join(delta.reasoning for delta in deltas)
        if thinking and self._view.shows_thinking:
            content.append({"type": "thinking", "thinking": thinking, "signature": self._facts.record.stream_id})
        num_calls = 0
        for part in parts:
            if isinstance(part, WholeCall):
                call_id = self._call_id(num_calls)
                content.append({"type": "tool_use", "id": call_id, "name": part.name, "input": part.arguments})
                num_calls += 1
            elif content and content[-1]["type"] == "text":
                content[-1]["text"] += part
            elif part:
                content.append({"type": "text", "text": part})
        return to_json(self._message(content, _stop_of(deltas[-1], reader, num_calls), end))

    def _message(self, content: Sequence[JsonBody], stop: JsonBody, end: End) -> JsonBody:
        return {
            "id": f"msg_{self._facts.record.stream_id}",
            "type": "message",
            "role": "assistant",
            "model": self._facts.record.model,
            "content": content,
            **stop,
            "usage": _usage(end),
            **conformity_json(end),
        }

    def _call_id(self, number: int) -> str:
        return f"toolu_{self._facts.record.stream_id}_{number}"

    def _thinking(self, text: str) -> str:
        block = {"type": "thinking", "thinking": "", "signature": ""}
        begin = "" if self._open_kind == "thinking" else self._begin(block)
        return begin + self._delta(f'{{"type":"thinking_delta","thinking":{quote(text)}}}')

    def _text(self, text: str) -> str:
        if not text:
            return ""
        begin = "" if self._open_kind == "text" else self._begin(_TEXT_BLOCK)
        return begin + self._delta(f'{{"type":"text_delta","text":{quote(text)}}}')

    def _call(self, part: CallPart) -> str:
        if part.arguments:
            return self._delta(f'{{"type":"input_json_delta","partial_json":{quote(part.arguments)}}}')
        return self._begin({"type": "tool_use", "id": self._call_id(part.index), "name": part.name, "input": {}})

    def _begin(self, block: JsonBody) -> str:
        closed = self._close()
        self._block += 1
        self._open_kind = block["type"]
        return closed + _frame("content_block_start", {"index": self._block, "content_block": block})

    def _delta(self, delta: str) -> str:
        return (
            f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{self._block},'
            f'"delta":{delta}}}\n\n'
        )

    def _close(self) -> str:
        if not self._open_kind:
            return ""
        signed = ""
        if self._open_kind == "thinking":
            signed = self._delta(f'{{"type":"signature_delta","signature":{quote(self._facts.record.stream_id)}}}')
        self._open_kind = ""
        return signed + _frame("content_block_stop", {"index": self._block})


def _frame(name: str, fields: JsonBody) -> str:
    return f"event: {name}\ndata: {to_json({'type': name, **fields}).decode()}\n\n"


def _stop_of(last: TextDelta, reader: ToolCallReader | WholeCallReader | None, num_calls: int) -> JsonBody:
    if reader is not None and reader.is_over and num_calls:
        # The call is complete: after a forced call only the closing brace can be missing.
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reason = "end_turn"
    if last.finish_reason == "length":
        reason = "max_tokens"
    elif last.stop is not None:
        reason = "stop_sequence"
    elif num_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": last.stop}


def _usage(end: End) -> JsonBody:
    cached = end.num_cached_tokens
    usage: JsonBody = {"input_tokens": end.usage.num_prompt_tokens - (cached or 0)}
    if cached is not None:
        usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    usage["output_tokens"] = end.usage.num_completion_tokens
    if end.num_reasoning_tokens:
        usage["output_tokens_details"] = {"thinking_tokens": end.num_reasoning_tokens}
    return usage


def encode_error(error: TailraceError) -> tuple[int, bytes]:
    """`{"type": "error", "error": {"type", "message"}}`, also as the last event of a stream. The official client
    retries 429 and 5xx after Retry-After."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = _too_long(error) if isinstance(error, ContextLengthExceeded) else error.message
    return error.status, to_json({"type": "error", "error": {"type": kind, "message": message, **error.cut_fields}})


def _too_long(error: ContextLengthExceeded) -> str:
    """Return the texts of Anthropic's API, by which its clients decide to compact a conversation."""
    given, most = error.num_prompt_tokens, error.limit_tokens
    if not error.max_tokens:
        return f"prompt is too long: {given} tokens > {most} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {given} + {error.max_tokens} > {most}, decrease input "
        "length or `max_tokens` and try again"
    )
