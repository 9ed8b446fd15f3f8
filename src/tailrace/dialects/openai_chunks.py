"""How OpenAI's wire shows a stream: chunks, and whole answers."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.dialects.wire import (
    JsonBody,
    StreamFacts,
    deltas_by_choice,
    failure_of,
    quote,
    to_json,
    usage_json,
)
from tailrace.types import End, Event, TextDelta

__all__ = ["ChatEncoder", "TextEncoder"]

_DONE = b"data: [DONE]\n\n"


class _Encoder:
    """What chunks of both kinds have in common."""

    object_name: str
    id_prefix: str

    def __init__(self, facts: StreamFacts, *, include_usage: bool, n: int, logprobs: bool) -> None:
        self._facts = facts
        self._include_usage = include_usage
        self._n = n
        self._logprobs = logprobs
        self._head = (
            f'data: {{"id":{quote(self.id_prefix + facts.stream_id)},"object":"{self.object_name}",'
            f'"created":{facts.created_s},"model":{quote(facts.model)},"choices":['
        )
        self._tail = '],"usage":null}\n\n' if include_usage else "]}\n\n"

    def _end(self, end: End) -> bytes:
        if end.status != "done":
            return error_frame(end) + _DONE
        if not self._include_usage:
            return _DONE
        return f'{self._head}],"usage":{to_json(usage_json(end)).decode()}}}\n\n'.encode("ascii") + _DONE

    def _whole(self, object_name: str, events: Sequence[Event], choices: list[JsonBody]) -> bytes:
        end = events[-1] if events else None
        if not isinstance(end, End) or end.status != "done":
            raise failure_of(end if isinstance(end, End) else None)
        facts = self._facts
        return to_json(
            {
                "id": self.id_prefix + facts.stream_id,
                "object": object_name,
                "created": facts.created_s,
                "model": facts.model,
                "choices": choices,
                "usage": usage_json(end),
                "system_fingerprint": None,
            }
        )


class ChatEncoder(_Encoder):
    """`chat.completion.chunk`s: the role first, then content, then the finish_reason in a chunk of its own."""

    object_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, facts: StreamFacts, *, include_usage: bool, n: int, logprobs: bool) -> None:
        super().__init__(facts, include_usage=include_usage, n=n, logprobs=logprobs)
        self._opened: set[int] = set()

    def encode(self, seq: int, event: Event) -> bytes:
        if type(event) is End:
            return self._end(event)
        assert type(event) is TextDelta
        choice, chunks = event.choice, ""
        if choice not in self._opened:
            self._opened.add(choice)
            chunks = self._chunk(choice, '{"role":"assistant","content":""}', "null", "null")
        if event.text or self._logprobs:
            logprobs = to_json(self._logprobs_json([event])).decode() if self._logprobs else "null"
            chunks += self._chunk(choice, f'{{"content":{quote(event.text)}}}', logprobs, "null")
        if event.finish_reason is not None:
            chunks += self._chunk(choice, "{}", "null", f'"{event.finish_reason}"')
        return chunks.encode("ascii")

    def whole(self, events: Sequence[Event]) -> bytes:
        choices: list[JsonBody] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(delta.text for delta in deltas), "refusal": None},
                "logprobs": self._logprobs_json(deltas) if self._logprobs else None,
                "finish_reason": deltas[-1].finish_reason if deltas else None,
            }
            for index, deltas in enumerate(deltas_by_choice(events, self._n))
        ]
        return self._whole("chat.completion", events, choices)

    def _chunk(self, choice: int, delta: str, logprobs: str, finish: str) -> str:
        body = f'{{"index":{choice},"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish}}}'
        return self._head + body + self._tail

    def _logprobs_json(self, deltas: Sequence[TextDelta]) -> JsonBody:
        vocabulary = self._facts.vocabulary
        content = [
            {
                "token": vocabulary.token_text(token_id),
                "logprob": logprob,
                "bytes": list(vocabulary.pieces[token_id]),
                "top_logprobs": [],
            }
            for delta in deltas
            for token_id, logprob in zip(delta.token_ids, delta.logprobs, strict=False)
        ]
        return {"content": content, "refusal": None}


class TextEncoder(_Encoder):
    """`text_completion`s."""

    object_name = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, facts: StreamFacts, *, include_usage: bool, n: int, logprobs: bool) -> None:
        super().__init__(facts, include_usage=include_usage, n=n, logprobs=logprobs)
        self._offsets = [0] * n

    def encode(self, seq: int, event: Event) -> bytes:
        if type(event) is End:
            return self._end(event)
        assert type(event) is TextDelta
        if not event.text and not self._logprobs and event.finish_reason is None:
            return b""
        finish = "null" if event.finish_reason is None else f'"{event.finish_reason}"'
        logprobs = "null"
        if self._logprobs:
            logprobs = to_json(self._logprobs_json([event], self._offsets[event.choice])).decode()
            self._offsets[event.choice] += len(event.text)
        return (
            f'{self._head}{{"text":{quote(event.text)},"index":{event.choice},"logprobs":{logprobs},'
            f'"finish_reason":{finish}}}{self._tail}'
        ).encode("ascii")

    def whole(self, events: Sequence[Event]) -> bytes:
        choices: list[JsonBody] = [
            {
                "text": "".join(delta.text for delta in deltas),
                "index": index,
                "logprobs": self._logprobs_json(deltas, 0) if self._logprobs else None,
                "finish_reason": deltas[-1].finish_reason if deltas else None,
            }
            for index, deltas in enumerate(deltas_by_choice(events, self._n))
        ]
        return self._whole("text_completion", events, choices)

    def _logprobs_json(self, deltas: Sequence[TextDelta], offset: int) -> JsonBody:
        tokens, logprobs, offsets = [], [], []
        for delta in deltas:
            for token_id, logprob in zip(delta.token_ids, delta.logprobs, strict=False):
                tokens.append(self._facts.vocabulary.token_text(token_id))
                logprobs.append(logprob)
                offsets.append(offset)
            offset += len(delta.text)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


def error_frame(end: End) -> bytes:
    """A failure after the headers, in the form that both families of clients raise."""
    error = failure_of(end)
    body = {"message": error.message, "type": "server_error", "code": error.code, "param": None}
    return b"data: " + to_json({"error": body, "error_type": "generation"}) + b"\n\n"
