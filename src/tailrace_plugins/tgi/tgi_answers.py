"""TGI's answers: events, whole answers and errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import msgspec

from tailrace.dialects import (
    Encoder,
    EventStreamView,
    JsonBody,
    StreamFacts,
    TokenVocabulary,
    deltas_by_choice,
    failure_of,
    finished_end,
    finite,
    quote,
    to_json,
)
from tailrace.errors import (
    AdmissionError,
    ContextLengthExceeded,
    EngineError,
    QuotaExceeded,
    RequestError,
    TailraceError,
    UnknownModel,
)
from tailrace.types import Event, Released, TextDelta, TopLogprobs

__all__ = ["TGIEncoder", "TGIView", "encode_error"]


@dataclass(frozen=True, slots=True)
class TGIView(EventStreamView):
    whole_in_list: bool
    details: bool
    prefill: bool
    full_text: bool
    sampled: bool
    media_type = "text/event-stream"  # without a charset: @huggingface/inference 2 compares the whole value

    def open(self, facts: StreamFacts) -> Encoder:
        return TGIEncoder(facts, self)


class TGIEncoder(Encoder):
    def __init__(self, facts: StreamFacts, view: TGIView) -> None:
        self._facts = facts
        self._view = view
        self._text: list[str] = []
        self._num_tokens = 0

    def encode(self, seq: int, event: Event | Released) -> bytes:
        if not isinstance(event, TextDelta):
            if event.status == "done":
                return b""
            _, body = encode_error(failure_of(event))
            return b"data: " + body + b"\n\n"
        self._text.append(event.text)
        if event.text and len(event.token_ids) == 1 and not (event.finish_reason or event.top_logprobs):
            # nearly all events; what follows takes almost twice as long
            self._num_tokens += 1
            token = _token(event.token_ids[0], event.text, event.logprobs[0] if event.logprobs else math.nan, False)
            return (
                f'data: {{"index":{self._num_tokens},"token":{token},"generated_text":null,"details":null}}\n\n'
            ).encode("ascii")
        if not event.token_ids:
            return b""
        frames = []
        last = len(event.token_ids) - 1
        for position, token in enumerate(self._tokens(event)):
            self._num_tokens += 1
            generated = details = "null"
            top = ""
            if position < len(event.top_logprobs):
                top = f'"top_tokens":{_top_tokens(event.top_logprobs[position], self._facts.vocabulary)},'
            if position == last and event.finish_reason is not None:
                generated = quote(self._full("".join(self._text)))
                if self._view.details:
                    details = to_json(self._stream_details(event)).decode()
            frames.append(
                f'data: {{"index":{self._num_tokens},"token":{token},'
                f'{top}"generated_text":{generated},"details":{details}}}\n\n'
            )
        return "".join(frames).encode("ascii")

    def whole(self, events: Sequence[Event]) -> bytes:
        finished_end(events)
        facts, view = self._facts, self._view
        choices = deltas_by_choice(events, facts.record.num_choices)
        order = sorted(range(len(choices)), key=lambda choice: -_mean_logprob(choices[choice]))
        texts = [self._full("".join(delta.text for delta in choices[choice])) for choice in order]
        answer: JsonBody = {"generated_text": texts[0]}
        if view.details:
            logprobs = chain((None,), (finite(one.logprob) for one in choices[0][0].prompt_logprobs), repeat(None))
            prefill = [
                {"id": token_id, "text": facts.vocabulary.token_text(token_id), "logprob": logprob}
                for token_id, logprob in zip(facts.record.prompts[0].ids, logprobs, strict=False)
            ]
            answers = [self._details(choice, choices[choice], prefill if view.prefill else []) for choice in order]
            answer["details"] = answers[0]
            if len(answers) > 1:
                others = zip(texts[1:], answers[1:], strict=True)
                answer["details"]["best_of_sequences"] = [{"generated_text": text, **one} for text, one in others]
        return to_json([answer] if view.whole_in_list else answer)

    def _details(self, choice: int, deltas: Sequence[TextDelta], prefill: list[JsonBody]) -> JsonBody:
        details: JsonBody = {
            "finish_reason": _finish_reason(deltas[-1]),
            "generated_tokens": sum(len(delta.token_ids) for delta in deltas),
            "seed": None if self._seed is None else self._seed + choice,
            "prefill": prefill,
            "tokens": [msgspec.Raw(token.encode()) for delta in deltas for token in self._tokens(delta)],
        }
        if deltas[0].top_logprobs:
            details["top_tokens"] = [
                msgspec.Raw(_top_tokens(top, self._facts.vocabulary).encode())
                for delta in deltas
                for top in delta.top_logprobs
            ]
        return details

    @property
    def _seed(self) -> int | None:
        return self._facts.record.seed if self._view.sampled else None

    def _full(self, text: str) -> str:
        return self._facts.record.prompts[0].text + text if self._view.full_text else text

    def _tokens(self, delta: TextDelta) -> list[str]:
        """Return the JSON of each token. Special tokens have their name as text."""
        vocabulary, logprobs = self._facts.vocabulary, delta.logprobs
        tokens = []
        for position, (token_id, text) in enumerate(zip(delta.token_ids, self._texts(delta), strict=True)):
            special = not text and token_id in vocabulary.special_ids
            if special:
                text = vocabulary.token_text(token_id)
            tokens.append(_token(token_id, text, logprobs[position] if position < len(logprobs) else math.nan, special))
        return tokens

    def _texts(self, delta: TextDelta) -> list[str]:
        """Return the text of each token. They are the tokens' own texts if these add up to the text of the delta;
        otherwise the last one has the whole text."""
        if len(delta.token_ids) == 1:
            return [delta.text]
        vocabulary = self._facts.vocabulary
        shown_positions = [i for i, token_id in enumerate(delta.token_ids) if token_id not in vocabulary.special_ids]
        texts = [""] * len(delta.token_ids)
        if len(shown_positions) > 1:
            for shown in shown_positions:
                texts[shown] = vocabulary.token_text(delta.token_ids[shown])
        if "".join(texts) != delta.text:
            texts = [""] * len(delta.token_ids)
            texts[shown_positions[-1] if shown_positions else -1] = delta.text
        return texts

    def _stream_details(self, last: TextDelta) -> JsonBody:
        return {
            "finish_reason": _finish_reason(last),
            "generated_tokens": self._num_tokens,
            "seed": self._seed,
            "input_length": self._facts.record.num_prompt_tokens,
        }


def _token(token_id: int, text: str, logprob: float, special: bool) -> str:
    flag = "true" if special else "false"
    return f'{{"id":{token_id},"text":{quote(text)},"logprob":{_logprob(logprob)},"special":{flag}}}'


def _top_tokens(top: TopLogprobs, vocabulary: TokenVocabulary) -> str:
    tokens = (
        _token(token_id, vocabulary.token_text(token_id), logprob, token_id in vocabulary.special_ids)
        for token_id, logprob in top
    )
    return f"[{','.join(tokens)}]"


def _mean_logprob(deltas: Sequence[TextDelta]) -> float:
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


def _logprob(logprob: float) -> str:
    """Return a logprob with single precision, as in TGI. JSON has no infinity."""
    if not math.isfinite(logprob):
        return "null"
    digits = f"{logprob:.8g}"
    return digits if "." in digits or "e" in digits else digits + ".0"


def _finish_reason(last: TextDelta) -> str:
    if last.finish_reason == "stop":
        return "eos_token" if last.stop is None else "stop_sequence"
    return str(last.finish_reason)


def encode_error(error: TailraceError) -> tuple[int, bytes]:
    """`{"error", "error_type"}`. TGI's clients choose their exception by `error_type`."""
    status, message, kind = _error_of(error)
    return status, to_json({"error": message, "error_type": kind, **error.cut_fields})


def _error_of(error: TailraceError) -> tuple[int, str, str]:
    """Return status, message and type."""
    if isinstance(error, QuotaExceeded):
        return 429, error.message, "overloaded"
    if isinstance(error, AdmissionError):
        # Never 503: huggingface.js would retry it at once and endlessly.
        return 429, "Model is overloaded", "overloaded"
    if isinstance(error, EngineError):
        return 424, f"Request failed during generation: {error.message}", "generation"
    if isinstance(error, ContextLengthExceeded):
        return 422, f"Input validation error: {_too_long(error)}", "validation"
    if isinstance(error, RequestError):
        is_invalid = error.status == 400 or isinstance(error, UnknownModel)  # an adapter's name is a parameter here
        status = 422 if is_invalid else error.status
        return status, f"Input validation error: {error.message}", "validation"
    return error.status, error.message, error.code


def _too_long(error: ContextLengthExceeded) -> str:
    given, most = error.num_prompt_tokens, error.limit_tokens
    if not error.max_tokens:
        return f"`inputs` must have less than {most} tokens. Given: {given}"
    return (
        f"`inputs` tokens + `max_new_tokens` must be <= {most}. Given: {given} `inputs` tokens and "
        f"{error.max_tokens} `max_new_tokens`"
    )
