"""Converts a request's sampling parameters to llama.cpp's server.

Its own defaults change the answer (temperature 0.8, top_k 40, top_p 0.95, min_p 0.05), so every parameter is always
sent.
"""

from __future__ import annotations

from tailrace.engines.grammars.guidance import to_guidance
from tailrace.types import Sampling

__all__ = ["PARAMETERS", "SPARE_TOKENS", "request_body"]

PARAMETERS = frozenset((
    "allowed_token_ids", "grammar", "ignore_eos", "logit_bias", "max_tokens", "min_p", "repetition_penalty", "seed",
    "stop_token_ids", "temperature", "top_k", "top_p", "typical_p",
))  # fmt: skip
SPARE_TOKENS = 3  # a character that begins in the last token needs at most so many more

_MAX_SEED = 2**32 - 2  # the next value means: random
_MAX_END_TOKENS = 64  # more end tokens than any vocabulary has


def request_body(sampling: Sampling, num_prompt_tokens: int, vocab_size: int) -> dict[str, object]:
    """Return the request's fields except the prompt. Has no presence and frequency penalties: they also count the
    prompt. Tokens of `stop_token_ids` are left to the engine."""
    allowed = frozenset(sampling.allowed_token_ids)
    top_k = sampling.top_k
    if sampling.typical_p < 1:
        # An impossible token (end tokens with ignore_eos) makes the entropy NaN, and then every token is typical. So
        # top_k removes the least likely tokens first.
        num_possible = len(allowed) or max(1, vocab_size - _MAX_END_TOKENS)
        top_k = min(top_k or num_possible, num_possible)
    is_greedy = sampling.temperature <= 0
    num_tokens = (sampling.max_tokens or 0) + SPARE_TOKENS
    body: dict[str, object] = {
        "n_predict": num_tokens,
        "seed": (sampling.seed or 0) % (_MAX_SEED + 1),
        "ignore_eos": sampling.ignore_eos,
        # Penalties first and temperature second, as in other engines; by default, temperature is last.
        "samplers": ["penalties", "top_k"]
        if is_greedy
        else ["penalties", "temperature", "top_k", "typ_p", "top_p", "min_p"],
        "temperature": 1.0 if is_greedy else sampling.temperature,
        "top_k": 1 if is_greedy else top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": num_prompt_tokens + num_tokens if sampling.repetition_penalty != 1.0 else 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "dry_multiplier": 0.0,
        "xtc_probability": 0.0,
        "top_n_sigma": -1.0,
        "dynatemp_range": 0.0,
        "mirostat": 0,
        "n_probs": 0,
    }
    biases: list[tuple[int, float | bool]] = list(sampling.logit_bias)
    if allowed:
        biases += [(token_id, False) for token_id in range(vocab_size) if token_id not in allowed]  # False bans it
    if biases:
        body["logit_bias"] = biases
    if sampling.grammar is not None:
        body["grammar"] = to_guidance(sampling.grammar)
    return body
