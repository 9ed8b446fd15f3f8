"""AG-UI's events: a run between RUN_STARTED and RUN_FINISHED or RUN_ERROR."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.dialects import Encoder, EventStreamView, JsonBody, StreamFacts
from tailrace.errors import TailraceError
from tailrace.types import End, Event, Released
from tailrace_plugins.front_ends.chats import BlockEncoder, usage_of

__all__ = ["AgUiView"]


@dataclass(frozen=True, slots=True)
class AgUiView(EventStreamView):
    """`resumes`: the client comes back with the id of the last event that it has, if the answer breaks off."""

    resumes: bool = False

    def open(self, facts: StreamFacts) -> Encoder:
        return AgUiEncoder(facts, resumes=self.resumes)


class AgUiEncoder(BlockEncoder):
    def __init__(self, facts: StreamFacts, *, resumes: bool) -> None:
        super().__init__(facts)
        self._resumes = resumes

    def encode(self, seq: int, event: Event | Released) -> bytes:
        is_continued = self._resumes and isinstance(event, Released)  # by the next server
        return b"" if is_continued else super().encode(seq, event)

    def field(self, seq: int, index: int) -> str:
        return f"id: {self.facts.record.stream_id}.{seq}.{index}\n"

    @property
    def _run(self) -> JsonBody:
        return {"threadId": self.memo.thread, "runId": self.memo.run}

    def _message_id(self, block: int) -> str:
        return f"msg_{self.facts.record.stream_id}_{block}"

    def begin(self) -> list[JsonBody]:
        return [{"type": "RUN_STARTED", **self._run}]

    def finish(self, end: End, reason: str) -> list[JsonBody]:
        usage = {"model": self.facts.record.model, **usage_of(end)}
        return [{"type": "RUN_FINISHED", **self._run, "result": {"finishReason": reason}, "usage": [usage]}]

    def fail(self, error: TailraceError, *, is_cancelled: bool) -> list[JsonBody]:
        if is_cancelled:
            return [{"type": "RUN_FINISHED", **self._run, "outcome": {"type": "cancelled"}}]
        return [{"type": "RUN_ERROR", "message": error.message, "code": error.code, **error.cut_fields}]

    def open_block(self, kind: str, block: int) -> list[JsonBody]:
        message_id = self._message_id(block)
        if kind == "text":
            return [{"type": "TEXT_MESSAGE_START", "messageId": message_id, "role": "assistant"}]
        return [
            {"type": "REASONING_START", "messageId": message_id},
            {"type": "REASONING_MESSAGE_START", "messageId": message_id, "role": "reasoning"},
        ]

    def grow(self, kind: str, block: int, text: str) -> list[JsonBody]:
        name = "TEXT_MESSAGE_CONTENT" if kind == "text" else "REASONING_MESSAGE_CONTENT"
        return [{"type": name, "messageId": self._message_id(block), "delta": text}]

    def close_block(self, kind: str, block: int) -> list[JsonBody]:
        message_id = self._message_id(block)
        if kind == "text":
            return [{"type": "TEXT_MESSAGE_END", "messageId": message_id}]
        return [
            {"type": "REASONING_MESSAGE_END", "messageId": message_id},
            {"type": "REASONING_END", "messageId": message_id},
        ]

    def open_call(self, block: int, name: str) -> list[JsonBody]:
        return [{"type": "TOOL_CALL_START", "toolCallId": self.call_id(block), "toolCallName": name}]

    def grow_call(self, block: int, arguments: str) -> list[JsonBody]:
        return [{"type": "TOOL_CALL_ARGS", "toolCallId": self.call_id(block), "delta": arguments}]

    def close_call(self, block: int, name: str, arguments: str) -> list[JsonBody]:
        return [{"type": "TOOL_CALL_END", "toolCallId": self.call_id(block)}]
