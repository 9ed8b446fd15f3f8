"""The AI SDK's UI message stream, version 1 (ai 5 and 6): chunks as server-sent events, and `[DONE]`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tailrace.dialects import Encoder, EventStreamView, JsonBody, StreamFacts, conformity_json
from tailrace.errors import TailraceError
from tailrace.types import End, Event, Released, TextDelta
from tailrace_plugins.front_ends.chats import BlockEncoder, usage_of

__all__ = ["UiMessageView"]

_DONE = b"data: [DONE]\n\n"
_FINISH = {"tool_calls": "tool-calls"}


@dataclass(frozen=True, slots=True)
class UiMessageView(EventStreamView):
    def open(self, facts: StreamFacts) -> Encoder:
        return UiMessageEncoder(facts)


class UiMessageEncoder(BlockEncoder):
    def begin(self) -> list[JsonBody]:
        record = self.facts.record
        metadata = {"model": record.model, "streamId": record.stream_id}
        message_id = self.memo.message or f"msg_{record.stream_id}"
        return [
            {"type": "start", "messageId": message_id, "messageMetadata": metadata},
            {"type": "start-step"},
        ]

    def finish(self, end: End, reason: str) -> list[JsonBody]:
        metadata = {"usage": usage_of(end), **conformity_json(end)}
        return [
            {"type": "finish-step"},
            {"type": "finish", "finishReason": _FINISH.get(reason, reason), "messageMetadata": metadata},
        ]

    def fail(self, error: TailraceError, *, is_cancelled: bool) -> list[JsonBody]:
        if is_cancelled:
            return [{"type": "abort", "reason": error.message}]
        return [{"type": "error", "errorText": error.message, **error.cut_fields}]

    def tail(self, event: Event | Released) -> bytes:
        return b"" if isinstance(event, TextDelta) else _DONE

    def open_block(self, kind: str, block: int) -> list[JsonBody]:
        return [{"type": f"{kind}-start", "id": str(block)}]

    def grow(self, kind: str, block: int, text: str) -> list[JsonBody]:
        return [{"type": f"{kind}-delta", "id": str(block), "delta": text}]

    def close_block(self, kind: str, block: int) -> list[JsonBody]:
        return [{"type": f"{kind}-end", "id": str(block)}]

    def open_call(self, block: int, name: str) -> list[JsonBody]:
        return [{"type": "tool-input-start", "toolCallId": self.call_id(block), "toolName": name}]

    def grow_call(self, block: int, arguments: str) -> list[JsonBody]:
        return [{"type": "tool-input-delta", "toolCallId": self.call_id(block), "inputTextDelta": arguments}]

    def close_call(self, block: int, name: str, arguments: str) -> list[JsonBody]:
        call = {"toolCallId": self.call_id(block), "toolName": name}
        try:
            return [{"type": "tool-input-available", **call, "input": msgspec.json.decode(arguments or "{}")}]
        except msgspec.DecodeError:
            why = "The arguments are no JSON: they were cut off."
            return [{"type": "tool-input-error", **call, "input": arguments, "errorText": why}]
