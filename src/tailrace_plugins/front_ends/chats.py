"""What the wires of front ends share: the id of a chat is a topic of the streams of its answers; so a page that was
reloaded finds the answer that is made."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from tailrace.dialects import (
    CallPart,
    Encoder,
    Follow,
    Following,
    JsonBody,
    OnStream,
    ParsedRequest,
    Reply,
    StreamFacts,
    ToolCallReader,
    View,
    failure_of,
)
from tailrace.errors import TailraceError, UnknownStream
from tailrace.types import CallReading, End, Event, Released, TextDelta

__all__ = [
    "BlockEncoder",
    "ChatId",
    "ChatMemo",
    "chat_topic",
    "follow_running",
    "named_chat",
    "stop_running",
    "usage_of",
]

ChatId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class ChatMemo(msgspec.Struct, omit_defaults=True):
    """What a stream keeps of its request."""

    thread: str = ""  # AG-UI's ids of the chat and the run
    run: str = ""
    message: str = ""  # the id of the message that the answer continues; "": the answer is a new one
    question: str = ""  # the AI SDK's id of the last message of the user
    calls: CallReading | None = None

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def of(cls, facts: StreamFacts) -> ChatMemo:
        return msgspec.json.decode(facts.record.memo, type=cls)


def follow_running(view: View) -> Follow:
    """Return the act that follows the answer which is made in a chat, from its beginning; 204 if none is."""

    def parse(request: ParsedRequest) -> Following | Reply:
        return Reply(b"", 204) if request.newest is None else Following(request.newest.record.stream_id, 0, view)

    return Follow(parse, named_chat)


def stop_running(view: View) -> OnStream:
    """Return the act that stops the answer which is made in a chat; 404 if none is."""

    def find(request: ParsedRequest) -> tuple[str, View]:
        """Raises: UnknownStream."""
        if request.newest is None:
            raise UnknownStream("No answer is made in this chat.")
        return request.newest.record.stream_id, view

    return OnStream(find, "cancel", named_chat)


def chat_topic(chat: str) -> str:
    """Return the topic that the answers of a chat have."""
    return f"chat {chat}"


def named_chat(request: ParsedRequest) -> str:
    """Return the topic of the chat that the path names."""
    return chat_topic(request.path["chat"])


def usage_of(end: End) -> JsonBody:
    """Return the token counts of an answer, with the names of both libraries."""
    usage = {"inputTokens": end.usage.num_prompt_tokens, "outputTokens": end.usage.num_completion_tokens}
    usage["totalTokens"] = sum(end.usage)
    if end.num_cached_tokens is not None:
        usage["cachedInputTokens"] = end.num_cached_tokens
    if end.num_reasoning_tokens:
        usage["reasoningTokens"] = end.num_reasoning_tokens
    return usage


class BlockEncoder(Encoder):
    """Encodes an answer as blocks, one after the other: text, reasoning, and calls of tools. Each is opened, grows, and
    is closed. `kind` is "text" or "reasoning"; blocks have numbers from 0."""

    def __init__(self, facts: StreamFacts) -> None:
        self.facts = facts
        self.memo = ChatMemo.of(facts)
        self._reader = None if self.memo.calls is None else ToolCallReader(self.memo.calls)
        self._has_begun = False
        self._block = -1
        self._kind = ""  # of the open block; "": none is open
        self._call = ""  # name of the open call
        self._arguments: list[str] = []  # of the open call
        self._finish = ""

    @abstractmethod
    def begin(self) -> list[JsonBody]:
        """Return the events before the first block."""

    @abstractmethod
    def finish(self, end: End, reason: str) -> list[JsonBody]:
        """Return the events after the last block of a complete answer. `reason` is stop, length or tool_calls."""

    @abstractmethod
    def fail(self, error: TailraceError, *, is_cancelled: bool) -> list[JsonBody]:
        """Return the events of an answer that is cut off."""

    @abstractmethod
    def open_block(self, kind: str, block: int) -> list[JsonBody]: ...
    @abstractmethod
    def grow(self, kind: str, block: int, text: str) -> list[JsonBody]: ...
    @abstractmethod
    def close_block(self, kind: str, block: int) -> list[JsonBody]: ...
    @abstractmethod
    def open_call(self, block: int, name: str) -> list[JsonBody]: ...
    @abstractmethod
    def grow_call(self, block: int, arguments: str) -> list[JsonBody]: ...
    @abstractmethod
    def close_call(self, block: int, name: str, arguments: str) -> list[JsonBody]: ...

    def call_id(self, block: int) -> str:
        return f"call_{self.facts.record.stream_id}_{block}"

    def encode(self, seq: int, event: Event | Released) -> bytes:
        # ASCII, as on the other wires: some readers of lines also split at U+2028.
        frames = [
            f"{self.field(seq, index)}data: {json.dumps(frame, separators=(',', ':'))}\n\n"
            for index, frame in enumerate(self._frames(event))
        ]
        return "".join(frames).encode("ascii") + self.tail(event)

    def field(self, seq: int, index: int) -> str:
        """Return the field before the data of a frame, with its line break, or "". The frames of one event have indexes
        from 0."""
        return ""

    def tail(self, event: Event | Released) -> bytes:
        """Return what follows the last event."""
        return b""

    def whole(self, events: Sequence[Event]) -> bytes:
        return b"".join(self.encode(seq, event) for seq, event in enumerate(events, 1))

    def _frames(self, event: Event | Released) -> list[JsonBody]:
        frames = [] if self._has_begun else self.begin()
        self._has_begun = True
        if isinstance(event, TextDelta):
            return frames + self._delta(event)
        if event.status == "done":
            assert isinstance(event, End)
            return frames + self.finish(event, self._finish)
        return frames + self._close() + self.fail(failure_of(event), is_cancelled=event.status == "cancelled")

    def _delta(self, event: TextDelta) -> list[JsonBody]:
        frames = self._say("reasoning", event.reasoning)
        finish = event.finish_reason
        if self._reader is None:
            frames += self._say("text", event.text)
        else:
            parts = self._reader.push(event.text) + (self._reader.flush(is_cut=finish == "length") if finish else [])
            for part in parts:
                frames += self._say("text", part) if isinstance(part, str) else self._tell(part)
        if finish is not None:
            frames += self._close()
            has_calls = self._reader is not None and self._reader.num_calls > 0
            is_complete = finish != "length" or (self._reader is not None and self._reader.is_over)
            self._finish = "tool_calls" if has_calls and is_complete else finish
        return frames

    def _say(self, kind: str, text: str) -> list[JsonBody]:
        if not text:
            return []
        frames: list[JsonBody] = []
        if self._kind != kind:
            frames = self._close()
            self._block += 1
            self._kind = kind
            frames += self.open_block(kind, self._block)
        return frames + self.grow(kind, self._block, text)

    def _tell(self, part: CallPart) -> list[JsonBody]:
        if part.arguments:
            self._arguments.append(part.arguments)
            return self.grow_call(self._block, part.arguments)
        frames = self._close()
        self._block += 1
        self._kind, self._call = "call", part.name
        return frames + self.open_call(self._block, part.name)

    def _close(self) -> list[JsonBody]:
        kind, self._kind = self._kind, ""
        if not kind:
            return []
        if kind != "call":
            return self.close_block(kind, self._block)
        arguments = "".join(self._arguments)
        self._arguments.clear()
        return self.close_call(self._block, self._call, arguments)
