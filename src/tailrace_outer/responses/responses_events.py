"""Answers of `/v1/responses`: numbered events, and the response object."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from tailrace.dialects.answers import EventStreamView, ToolsView, logprobs_json
from tailrace.dialects.bodies import JsonBody, to_json
from tailrace.dialects.facts import StreamFacts
from tailrace.dialects.wire import Encoder, conformity_json, failure_of, finished_end
from tailrace.errors import ContextLengthExceeded, TailraceError, UnknownStream
from tailrace.text.arguments import arguments_object
from tailrace.text.calls import CallPart
from tailrace.text.custom_calls import CUSTOM_INPUT, CustomCallReader
from tailrace.types import CallReading, End, Event, Message, Released, TextDelta, ToolCall
from tailrace_outer.responses.responses_items import flat_name

__all__ = [
    "ResponsesEncoder",
    "ResponsesView",
    "answer_message",
    "encoded_event",
    "error_fields",
    "stream_id_of",
]

_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}  # and where a call has what the model wrote
_STATUS = {"queued": "queued", "running": "in_progress", "cancelled": "cancelled", "error": "failed",
           "interrupted": "failed"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResponsesView(EventStreamView):
    starting_after: int = -1  # the number of the last event that the client has seen
    must_finish: bool = False  # a whole answer that failed or is incomplete is an error
    is_found: bool = False  # by its id: a response that was not to be stored is not found
    is_deleted: bool = False

    def open(self, facts: StreamFacts) -> Encoder:
        return ResponsesEncoder(facts, self)


def stream_id_of(response_id: str) -> str:
    return response_id.removeprefix("resp_")


def answer_message(facts: StreamFacts, events: Sequence[Event]) -> Message:
    """Return the answer of a stream as a message."""
    encoder = ResponsesEncoder(facts, ResponsesView())
    encoder.fold(events)
    text = "".join(part["text"] for item in encoder.items if item["type"] == "message" for part in item["content"])
    calls = tuple(
        ToolCall(item["call_id"], flat_name(item.get("namespace"), item["name"]), _arguments_of(item))
        for item in encoder.items
        if item["type"] in _CALLS
    )
    return Message("assistant", text, calls, reasoning="".join(event.reasoning for event in _deltas(events)))


class ResponsesEncoder(Encoder):
    """Encodes a stream. Events are numbered from 0, equally for every reader."""

    says_why_it_failed = True  # with an `error` after the last event

    def __init__(self, facts: StreamFacts, view: ResponsesView) -> None:
        memo = msgspec.json.decode(facts.record.memo) if facts.record.memo else {}
        self._facts = facts
        self._view = view
        self._starting_after = view.starting_after
        self._echo: JsonBody = memo.get("echo", {})
        if view.is_found and self._echo.get("store") is False:
            raise UnknownStream("There is no such response.", param="response_id")
        self._custom_names: list[str] = memo.get("custom", [])
        self._namespaces: dict[str, tuple[str, str]] = memo.get("namespaces", {})
        self._custom: CustomCallReader | None = None  # of the last item, if it is a custom tool's call
        self._logprobs: bool = memo.get("logprobs", False)
        calls = msgspec.convert(memo.get("calls"), CallReading | None)
        if memo.get("reads_tools"):  # of a version with one format
            calls = CallReading(forced=memo["forced"], single=memo["single_call"])
        self._reader = ToolsView(calls).reader()
        self.next_number = 0
        self._is_warmup: bool = memo.get("warmup", False)  # what the model writes does not belong to it
        self.out: list[tuple[str, str]] = []  # types and JSON of events
        self._pending_text: list[str] = []  # what the last item gained and does not hold yet: added to it, it is copied
        self._pending_logprobs: list[JsonBody] = []  # logprobs of tokens whose text is still held back
        self._finish: str | None = None
        self.items: list[JsonBody] = []  # of the output; the last one may be growing

    def encode(self, seq: int, event: Event | Released) -> bytes:
        self.add(event)
        return self._taken()

    def add(self, event: Event | Released) -> None:
        if isinstance(event, Released):
            self.release(event)
            return
        self.open()
        if isinstance(event, End):
            self._close(event)
        elif event.choice == 0 and not self._is_warmup:
            self._add_delta(event)

    def release(self, ending: Released) -> None:
        """Emit the reason. It has no number of its own: the next event has the next number."""
        self.out.append(("error", encoded_event("error", max(0, self.next_number - 1), error_fields(ending))))

    def beat(self, usual: bytes) -> bytes:
        """Return an event: Codex CLI gives up after five minutes without one, and a comment is none.

        First come those that open every response, then what OpenAI's servers send, with the number of the event before.
        """
        self.add_beat()
        return self._taken()

    def add_beat(self) -> None:
        if self.next_number:
            self.out.append(("keepalive", encoded_event("keepalive", self.next_number - 1, {})))
        else:
            self.open()

    def whole(self, events: Sequence[Event]) -> bytes:
        if self._view.is_deleted:
            return to_json({"id": self._id, "object": "response", "deleted": True})
        if self._view.must_finish:
            finished_end(events)
        self.fold(events)
        end = events[-1] if events and isinstance(events[-1], End) else None
        return to_json(self._response(self._status(end), end))

    def fold(self, events: Sequence[Event]) -> None:
        """Add a stream's events to `items` without encoding them."""
        self._starting_after = sys.maxsize
        for seq, event in enumerate(events if self._logprobs else _merged(events), 1):
            self.encode(seq, event)
        self._merge_pending()

    def open(self) -> None:
        if not self.next_number:
            for kind in ("response.created", "response.in_progress"):
                self._emit(kind, {"response": self._response("in_progress", None)})

    def _taken(self) -> bytes:
        out, self.out = self.out, []
        return "".join(f"event: {kind}\ndata: {text}\n\n" for kind, text in out).encode("ascii")

    @property
    def _id(self) -> str:
        return f"resp_{self._facts.record.stream_id}"

    def _status(self, end: End | None) -> str:
        if end is None or end.status != "done":
            return _STATUS[end.status if end is not None else self._facts.status]
        if self._is_warmup:
            return "completed"
        is_complete = self._finish != "length" or (self._reader is not None and self._reader.is_over)
        return "completed" if is_complete else "incomplete"

    def _emit(self, kind: str, fields: JsonBody) -> None:
        number, self.next_number = self.next_number, self.next_number + 1
        if number > self._starting_after:
            self.out.append((kind, encoded_event(kind, number, fields)))

    def _add_delta(self, delta: TextDelta) -> None:
        if delta.reasoning:
            self._add_reasoning(delta.reasoning)
        parts: list[str | CallPart] = [delta.text] if delta.text else []
        if self._reader is not None:
            parts = self._reader.push(delta.text)
            if delta.finish_reason is not None:
                parts += self._reader.flush(is_cut=delta.finish_reason == "length")
        if self._logprobs:
            self._pending_logprobs += logprobs_json(self._facts.vocabulary, delta)
        for part in parts:
            if isinstance(part, str):
                self._add_text(part)
            else:
                self._add_call(part)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason

    def _add_reasoning(self, text: str) -> None:
        if not self.items:
            name = f"rs_{self._facts.record.stream_id}"
            item: JsonBody = {"id": name, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
            self._begin(item)
            item["content"] = [{"type": "reasoning_text", "text": ""}]
            self._emit_for_item("response.content_part.added", {"part": item["content"][0]})
        self._pending_text.append(text)
        self._emit_for_item("response.reasoning_text.delta", {"delta": text})

    def _add_text(self, text: str) -> None:
        if not self.items or self.items[-1]["type"] != "message":
            self._open_message()
        item = self.items[-1]
        logprobs, self._pending_logprobs = self._pending_logprobs, []
        self._pending_text.append(text)
        item["content"][0]["logprobs"] += logprobs
        self._emit_for_item("response.output_text.delta", {"delta": text, "logprobs": logprobs})

    def _open_message(self) -> None:
        item: JsonBody = {
            "id": f"msg_{self._next_name}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        self._begin(item)
        item["content"] = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
        self._emit_for_item("response.content_part.added", {"part": item["content"][0]})

    @property
    def _next_name(self) -> str:
        """The unique part of the next item's id: its number, without counting reasoning."""
        num_items = sum(item["type"] != "reasoning" for item in self.items)
        return f"{self._facts.record.stream_id}_{num_items}"

    def _add_call(self, part: CallPart) -> None:
        self._pending_logprobs = []  # calls have no logprobs
        if part.name:
            namespace, name = self._namespaces.get(part.name, (None, part.name))
            is_custom, number = part.name in self._custom_names, self._next_name
            kind, field = ("custom_tool_call", "input") if is_custom else ("function_call", "arguments")
            item: JsonBody = {"id": f"{'ctc' if is_custom else 'fc'}_{number}", "type": kind, "status": "in_progress",
                              "call_id": f"call_{number}", "name": name, field: ""}  # fmt: skip
            self._begin(item if namespace is None else item | {"namespace": namespace})
            self._custom = CustomCallReader() if is_custom else None
        elif self._custom is not None:
            self._add_input(self._custom.push(part.arguments))
        else:
            self._pending_text.append(part.arguments)
            self._emit_for_item("response.function_call_arguments.delta", {"delta": part.arguments})

    def _add_input(self, text: str) -> None:
        """Add to the text of a custom tool's call."""
        if text:
            self._pending_text.append(text)
            self._emit_for_item("response.custom_tool_call_input.delta", {"delta": text})

    def _begin(self, item: JsonBody) -> None:
        self._finish_item("completed")
        self.items.append(item)
        self._emit("response.output_item.added", {"output_index": len(self.items) - 1, "item": item})

    def _emit_for_item(self, kind: str, fields: JsonBody) -> None:
        """Emit an event about the last item."""
        item = self.items[-1]
        position = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if item["type"] not in _CALLS:
            position["content_index"] = 0
        self._emit(kind, {**position, **fields})

    def _merge_pending(self) -> None:
        """Add the pending text to the last item."""
        text, self._pending_text = "".join(self._pending_text), []
        field = _CALLS.get(self.items[-1]["type"]) if text else None
        if field is not None:
            self.items[-1][field] += text
        elif text:
            self.items[-1]["content"][0]["text"] += text

    def _finish_item(self, status: str) -> None:
        """Close the last item, if it is in progress."""
        if self._custom is not None:
            rest, self._custom = self._custom.flush(), None
            self._add_input(rest)
        self._merge_pending()
        if not self.items or self.items[-1]["status"] != "in_progress":
            return
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            self._emit_for_item("response.output_text.done", {"text": part["text"], "logprobs": part["logprobs"]})
            self._emit_for_item("response.content_part.done", {"part": part})
        elif item["type"] == "reasoning":
            part = item["content"][0]
            self._emit_for_item("response.reasoning_text.done", {"text": part["text"]})
            self._emit_for_item("response.content_part.done", {"part": part})
        elif item["type"] == "custom_tool_call":
            self._emit_for_item("response.custom_tool_call_input.done", {"input": item["input"]})
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            self._emit_for_item("response.function_call_arguments.done", done)
        self._emit("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})

    def _close(self, end: End) -> None:
        status = self._status(end)
        if not self.items and end.status == "done" and not self._is_warmup:
            self._open_message()
        self._finish_item("completed" if status == "completed" else "incomplete")
        event = status if status in ("completed", "failed") else "incomplete"
        self._emit(f"response.{event}", {"response": self._response(status, end)})
        if end.status != "done" and self.says_why_it_failed:
            self._emit("error", error_fields(end))

    def _completed_s(self, end: End | None) -> int | None:
        spent = end.spent if end is not None else None
        return None if spent is None else self._facts.created_s + round(spent.total_s)

    def _response(self, status: str, end: End | None) -> JsonBody:
        echo = self._echo
        failed = end is not None and end.status in ("error", "interrupted")
        of_conversation = {"conversation": echo["conversation"]} if "conversation" in echo else {}
        return of_conversation | {
            "id": self._id,
            "object": "response",
            "created_at": self._facts.created_s,
            "status": status,
            "background": echo.get("background", False),
            "completed_at": self._completed_s(end) if status == "completed" else None,
            "error": _error(failure_of(end)) if failed else None,
            "frequency_penalty": echo.get("frequency_penalty", 0.0),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": echo.get("instructions"),
            "max_output_tokens": echo.get("max_output_tokens"),
            "max_tool_calls": None,
            "model": self._facts.record.model,
            "output": list(self.items),
            "parallel_tool_calls": echo.get("parallel_tool_calls", True),
            "presence_penalty": echo.get("presence_penalty", 0.0),
            "previous_response_id": echo.get("previous_response_id"),
            "prompt_cache_key": None,
            "reasoning": {"effort": None, "summary": None} | echo.get("reasoning", {}),
            "safety_identifier": None,
            "service_tier": "default",
            "store": echo.get("store", True),
            "temperature": echo.get("temperature", 1.0),
            "text": echo.get("text", {"format": {"type": "text"}}),
            "tool_choice": echo.get("tool_choice", "auto"),
            "tools": echo.get("tools", []),
            "top_logprobs": echo.get("top_logprobs", 0),
            "top_p": echo.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": _usage(end) if end is not None else None,
            "user": echo.get("user"),
            "metadata": echo.get("metadata", {}),
            **(conformity_json(end) if end is not None else {}),
        }


def encoded_event(kind: str, number: int, fields: JsonBody) -> str:
    return to_json({"type": kind, "sequence_number": number, **fields}).decode()


def _error(error: TailraceError) -> JsonBody:
    # Clients know few codes.
    code = error.code if error.code == ContextLengthExceeded.code else "server_error"
    return {"code": code, "message": error.message, **error.cut_fields}


def error_fields(ending: End | Released) -> JsonBody:
    error = failure_of(ending)
    named: JsonBody = {"code": error.code, "message": error.message, "param": None, **error.cut_fields}
    return {**named, "error": {"type": "server_error", **named}}


def _arguments_of(item: JsonBody) -> str:
    """Return the arguments of a call, as the model sees them."""
    if item["type"] == "custom_tool_call":
        return arguments_object({CUSTOM_INPUT: item["input"]})
    return arguments_object(item["arguments"])


def _merged(events: Sequence[Event]) -> Iterator[Event]:
    """Yield equivalent events, with all text in one delta."""
    deltas = _deltas(events)
    if reasoning := "".join(delta.reasoning for delta in deltas):
        yield TextDelta("", (), reasoning=reasoning)
    if deltas:
        yield TextDelta("".join(delta.text for delta in deltas), (), finish_reason=deltas[-1].finish_reason)
    if events and isinstance(events[-1], End):
        yield events[-1]


def _deltas(events: Sequence[Event]) -> list[TextDelta]:
    return [event for event in events if isinstance(event, TextDelta) and event.choice == 0]


def _usage(end: End) -> JsonBody:
    return {
        "input_tokens": end.usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.num_cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": end.usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.num_reasoning_tokens},
        "total_tokens": sum(end.usage),
    }
