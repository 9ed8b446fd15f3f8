"""Tokens and their log probabilities, as OpenAI writes them and others after it."""

from __future__ import annotations

import math

from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.wire import Vocabulary
from tailrace.types import TextDelta

__all__ = ["finite", "logprobs_json", "token_json"]

_LEAST = -9999.0


def logprobs_json(vocabulary: Vocabulary, delta: TextDelta) -> list[JsonBody]:
    """The tokens of an event, each with its alternatives, of which there may be none."""
    found = []
    for place, (token_id, logprob) in enumerate(zip(delta.token_ids, delta.logprobs, strict=False)):
        top = delta.top_logprobs[place] if place < len(delta.top_logprobs) else ()
        alternatives = [token_json(vocabulary, *one) for one in top]
        found.append(token_json(vocabulary, token_id, logprob) | {"top_logprobs": alternatives})
    return found


def finite(logprob: float) -> float:
    """A number that JSON has, and that clients can compare."""
    return max(logprob, _LEAST) if math.isfinite(logprob) else _LEAST


def token_json(vocabulary: Vocabulary, token_id: int, logprob: float) -> JsonBody:
    pieces = vocabulary.pieces
    # Models may have more rows than their tokenizer has tokens.
    piece = pieces[token_id] if token_id < len(pieces) else b""
    return {"token": vocabulary.token_text(token_id), "logprob": finite(logprob), "bytes": list(piece)}
