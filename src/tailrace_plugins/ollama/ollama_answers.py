"""Ollama's answers: lines of JSON, the last with `done` and the counts, and whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.dialects import (
    Encoder,
    JsonBody,
    StreamFacts,
    WholeCall,
    WholeCallReader,
    conformity_json,
    deltas_by_choice,
    failure_of,
    finished_end,
    logprobs_json,
    quote,
    time_of,
    to_json,
)
from tailrace.errors import AdmissionError, ContextLengthExceeded, QuotaExceeded, TailraceError
from tailrace.types import CallReading, End, Event, FinishReason, Released, TextDelta

__all__ = ["OllamaEncoder", "OllamaView", "encode_error"]


@dataclass(frozen=True, slots=True)
class OllamaView:
    model: str
    is_chat: bool
    logprobs: bool = False
    calls: CallReading | None = None
    shows_thinking: bool = True
    media_type = "application/x-ndjson"

    @property
    def heartbeat(self) -> bytes:
        """An empty piece of text: clients parse every line, and there are no comments."""
        return to_json({"model": self.model, **_shown(self, "", []), "done": False}) + b"\n"

    def open(self, facts: StreamFacts) -> Encoder:
        return OllamaEncoder(facts, self)


class OllamaEncoder(Encoder):
    def __init__(self, facts: StreamFacts, view: OllamaView) -> None:
        self._facts = facts
        self._view = view
        self._named: JsonBody = {"model": facts.record.model, "created_at": time_of(facts.created_s)}
        self._head = to_json(self._named)[:-1].decode()
        self._reader = WholeCallReader(view.calls, cut_is_text=True) if view.calls is not None else None
        self._num_calls = 0
        self._reason = "stop"

    def encode(self, seq: int, event: Event | Released) -> bytes:
        if not isinstance(event, TextDelta):
            if event.status != "done":
                return encode_error(failure_of(event))[1] + b"\n"
            return to_json({**self._named, **_shown(self._view, "", []), **self._done(event)}) + b"\n"
        if event.finish_reason is not None:
            self._reason = event.finish_reason
        logprobs = f',"logprobs":{to_json(self._logprobs([event])).decode()}' if self._view.logprobs else ""
        if event.reasoning and self._view.shows_thinking:
            return self._line('""', logprobs, thinking=f',"thinking":{quote(event.reasoning)}')
        if self._reader is None:
            return self._line(quote(event.text), logprobs) if event.text or logprobs else b""
        lines = [self._part(part) for part in _parts(self._reader, event.text, event.finish_reason)]
        if logprobs:
            lines.append(self._line('""', logprobs))
        return b"".join(lines)

    def whole(self, events: Sequence[Event]) -> bytes:
        end = finished_end(events)
        (deltas,) = deltas_by_choice(events, 1)
        self._reason = str(deltas[-1].finish_reason)
        text = "".join(delta.text for delta in deltas)
        parts: Sequence[str | WholeCall] = (
            [text] if self._reader is None else _parts(self._reader, text, deltas[-1].finish_reason)
        )
        content = "".join(part for part in parts if isinstance(part, str))
        calls = [part for part in parts if isinstance(part, WholeCall)]
        answer = {**self._named, **_shown(self._view, content, calls), **self._done(end)}
        thinking = "".join(delta.reasoning for delta in deltas)
        if thinking and self._view.shows_thinking:
            (answer["message"] if self._view.is_chat else answer)["thinking"] = thinking
        if self._view.logprobs:
            answer["logprobs"] = self._logprobs(deltas)
        return to_json(answer)

    def _line(self, text: str, more: str = "", *, thinking: str = "") -> bytes:
        """Return a line. `text` and `thinking` are JSON."""
        shown = f'"response":{text}{thinking}'
        if self._view.is_chat:
            shown = f'"message":{{"role":"assistant","content":{text}{thinking}}}'
        return f'{self._head},{shown},"done":false{more}}}\n'.encode("ascii")

    def _part(self, part: str | WholeCall) -> bytes:
        if isinstance(part, str):
            return self._line(quote(part)) if part else b""
        shown = _shown(self._view, "", [part], index=self._num_calls)
        self._num_calls += 1
        return to_json({**self._named, **shown, "done": False}) + b"\n"

    def _done(self, end: End) -> JsonBody:
        done: JsonBody = {
            "done": True,
            "done_reason": self._reason,
            "prompt_eval_count": end.usage.num_prompt_tokens,
            "eval_count": end.usage.num_completion_tokens,
        }
        if end.spent is not None:  # in nanoseconds, as in Ollama
            total, prompt, answer = (round(seconds * 1e9) for seconds in end.spent)
            done |= {
                "total_duration": total,
                "load_duration": 0,
                "prompt_eval_duration": prompt,
                "eval_duration": answer,
            }
        return done | conformity_json(end)

    def _logprobs(self, deltas: Sequence[TextDelta]) -> list[JsonBody]:
        found = [one for delta in deltas for one in logprobs_json(self._facts.vocabulary, delta)]
        return [{name: value for name, value in one.items() if value or name != "top_logprobs"} for one in found]


def _parts(reader: WholeCallReader, text: str, finish_reason: FinishReason | None) -> Sequence[str | WholeCall]:
    parts = reader.push(text)
    return parts + reader.flush(is_cut=finish_reason == "length") if finish_reason is not None else parts


def _shown(view: OllamaView, text: str, calls: Sequence[WholeCall], *, index: int = 0) -> JsonBody:
    """Return the text and the calls of a line. The first call has the number `index`."""
    if not view.is_chat:
        return {"response": text}
    message: JsonBody = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"function": {"index": number, "name": call.name, "arguments": call.arguments}}
            for number, call in enumerate(calls, index)
        ]
    return {"message": message}


def encode_error(error: TailraceError) -> tuple[int, bytes]:
    """`{"error"}`, also as the last line of a stream. A busy server answers 503, as Ollama does."""
    is_busy = isinstance(error, AdmissionError) and not isinstance(error, QuotaExceeded)
    message = error.message
    if isinstance(error, ContextLengthExceeded):  # clients look for these words
        message = f"The input length exceeds the context length. {message}"
    return 503 if is_busy else error.status, to_json({"error": message, **error.cut_fields})
