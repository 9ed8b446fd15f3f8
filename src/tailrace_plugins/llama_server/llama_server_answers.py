"""Answers of llama.cpp's server: one object, or events with one for each piece of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from tailrace.dialects import (
    Encoder,
    EventStreamView,
    JsonBody,
    StreamFacts,
    TokenVocabulary,
    failure_of,
    finished_end,
    logprobs_json,
    to_json,
)
from tailrace.errors import ContextLengthExceeded, TailraceError
from tailrace.types import End, Event, Released, TextDelta

__all__ = ["LlamaView", "encode_error"]


@dataclass(frozen=True, slots=True)
class LlamaView(EventStreamView):
    is_only_prompt: bool
    returns_tokens: bool
    has_probabilities: bool
    response_fields: tuple[str, ...]
    model: str

    def open(self, facts: StreamFacts) -> Encoder:
        return LlamaEncoder(facts, self)


class LlamaEncoder(Encoder):
    def __init__(self, facts: StreamFacts, view: LlamaView) -> None:
        self._facts = facts
        self._view = view
        self._num_tokens = 0
        self._held_back: list[int] = []  # tokens whose text comes later
        self._probabilities: list[JsonBody] = []  # of these tokens
        self._last = TextDelta("", ())

    def encode(self, seq: int, event: Event | Released) -> bytes:
        if not isinstance(event, TextDelta):
            if event.status != "done":
                return b"data: " + encode_error(failure_of(event))[1] + b"\n\n"
            return self._frame(self._final(event, "", ()))
        self._last = event
        self._num_tokens += len(event.token_ids)
        self._held_back += event.token_ids
        if self._view.has_probabilities:
            self._probabilities += _probabilities(self._facts.vocabulary, event)
        if self._view.is_only_prompt or not (event.text or event.finish_reason):
            return b""
        token_ids, self._held_back = self._held_back, []
        probabilities, self._probabilities = self._probabilities, []
        return self._frame(
            {
                "index": event.choice,
                "content": event.text,
                "tokens": token_ids if self._view.returns_tokens else [],
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": self._num_tokens,
                "tokens_evaluated": self._facts.record.num_prompt_tokens,
                **({"completion_probabilities": probabilities} if probabilities else {}),
            }
        )

    def whole(self, events: Sequence[Event]) -> bytes:
        end = finished_end(events)
        deltas = [event for event in events if isinstance(event, TextDelta)]
        self._last = deltas[-1]
        text = "".join(delta.text for delta in deltas)
        ids = [token_id for delta in deltas for token_id in delta.token_ids]
        if self._view.is_only_prompt:
            text, ids = "", []
        answer = self._final(end, text, ids if self._view.returns_tokens else ())
        if self._view.has_probabilities and not self._view.is_only_prompt:
            found = [one for delta in deltas for one in _probabilities(self._facts.vocabulary, delta)]
            answer["completion_probabilities"] = found
        if self._view.response_fields:
            answer = _selected(answer, self._view.response_fields)
        return to_json(answer)

    def _frame(self, body: JsonBody) -> bytes:
        return b"data: " + to_json(body) + b"\n\n"

    def _final(self, end: End, text: str, token_ids: Sequence[int]) -> JsonBody:
        num_prompt, num_answer = end.usage.num_prompt_tokens, end.usage.num_completion_tokens
        if self._view.is_only_prompt:
            num_answer = 0
        stop_type = "limit" if self._last.finish_reason == "length" or self._view.is_only_prompt else "eos"
        if self._last.stop is not None:
            stop_type = "word"
        return {
            "index": 0,
            "content": text,
            "tokens": list(token_ids),
            "id_slot": -1,
            "stop": True,
            "model": self._view.model,
            "tokens_predicted": num_answer,
            "tokens_evaluated": num_prompt,
            "generation_settings": {},
            "prompt": "",
            "has_new_line": "\n" in text,
            "truncated": False,
            "stop_type": stop_type,
            "stopping_word": self._last.stop or "",
            "tokens_cached": num_prompt + num_answer,
            "timings": _timings(end, num_answer),
        }


def _probabilities(vocabulary: TokenVocabulary, delta: TextDelta) -> list[JsonBody]:
    """Return the tokens of an event, each with the likeliest ones at its position."""
    likeliest = chain(delta.top_logprobs, repeat(()))
    return [
        {"id": token_id, **shown, "top_logprobs": _with_ids([token_id for token_id, _ in top], shown["top_logprobs"])}
        for token_id, shown, top in zip(delta.token_ids, logprobs_json(vocabulary, delta), likeliest, strict=False)
    ]


def _with_ids(token_ids: Sequence[int], shown: Sequence[JsonBody]) -> list[JsonBody]:
    return [{"id": token_id, **one} for token_id, one in zip(token_ids, shown, strict=True)]


def _timings(end: End, num_answer: int) -> JsonBody:
    """Return the times of the prompt and of the answer, in milliseconds and in tokens a second."""
    num_cached = end.num_cached_tokens or 0
    num_prompt = end.usage.num_prompt_tokens - num_cached
    timings: JsonBody = {"cache_n": num_cached, "prompt_n": num_prompt, "predicted_n": num_answer}
    if end.spent is None:
        return timings
    for name, count, seconds in (
        ("prompt", num_prompt, end.spent.prompt_s),
        ("predicted", num_answer, end.spent.answer_s),
    ):
        milliseconds = seconds * 1000
        timings |= {
            f"{name}_ms": milliseconds,
            f"{name}_per_token_ms": milliseconds / count if count else 0.0,
            f"{name}_per_second": count / seconds if seconds else 0.0,
        }
    return timings


def _selected(answer: JsonBody, paths: Sequence[str]) -> JsonBody:
    """Return the wanted fields by their paths, such as `timings/prompt_ms`. Unknown ones are left out."""
    found = {}
    for path in paths:
        value: Any = answer  # JSON
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found


def encode_error(error: TailraceError) -> tuple[int, bytes]:
    """`{"error": {"code", "message", "type"}}`; `code` is the status."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 501: "not_supported_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 429 else "server_error")
    if error.status in (429, 503):
        kind = "unavailable_error"
    body: JsonBody = {"code": error.status, "message": error.message, "type": kind, **error.cut_fields}
    if isinstance(error, ContextLengthExceeded):
        body["type"] = "exceed_context_size_error"
    return error.status, to_json({"error": body})
