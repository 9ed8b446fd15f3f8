"""Converts a request's sampling parameters to openvino-genai's configuration."""

from __future__ import annotations

from typing import Any

import openvino_genai as genai

from tailrace.engines.grammars.ebnf import to_rules
from tailrace.types import Sampling

__all__ = ["PARAMETERS", "library_config"]

PARAMETERS = frozenset((
    "frequency_penalty", "grammar", "ignore_eos", "logprobs", "max_tokens", "min_p", "presence_penalty",
    "repetition_penalty", "seed", "temperature", "top_k", "top_p",
))  # fmt: skip

_NGRAM_TOKENS = 3  # the last tokens, whose earlier occurrences predict the next ones


def library_config(
    sampling: Sampling, eos_token_ids: tuple[int, ...], prompt_lookup_tokens: int = 0
) -> Any:  # Any: the library's stubs do not hold up
    """Convert sampling parameters. Raises: the library's RuntimeError or TypeError for invalid values (TypeError: a
    seed of more than 64 bits); GrammarError for a grammar that cannot be used."""
    config = genai.GenerationConfig()
    config.max_new_tokens = sampling.max_tokens
    config.ignore_eos = sampling.ignore_eos
    if eos_token_ids:  # otherwise those of the model directory
        config.stop_token_ids = set(eos_token_ids)
        config.eos_token_id = eos_token_ids[0]
    config.rng_seed = sampling.seed
    if sampling.temperature > 0:
        config.do_sample = True
        config.temperature = sampling.temperature
        config.top_p = sampling.top_p
        config.min_p = sampling.min_p
        if sampling.top_k:
            config.top_k = sampling.top_k
    config.repetition_penalty = sampling.repetition_penalty
    config.presence_penalty = sampling.presence_penalty
    config.frequency_penalty = sampling.frequency_penalty
    if prompt_lookup_tokens:  # set in every request, or the pipeline fails in its next step
        config.num_assistant_tokens = prompt_lookup_tokens
        config.max_ngram_size = _NGRAM_TOKENS
    if sampling.logprobs:
        config.logprobs = 1
    if sampling.grammar is not None:
        structure = genai.StructuredOutputConfig()
        structure.grammar = to_rules(sampling.grammar).text
        config.structured_output_config = structure
    config.validate()
    return config
