"""Token ids as bad words of vLLM, which takes only texts."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.sampling_params import SamplingParams

__all__ = ["set_bad_words"]


def set_bad_words(params: SamplingParams, bad_words: Sequence[Sequence[int]]) -> None:
    params._bad_words_token_ids = [list(word) for word in bad_words]
