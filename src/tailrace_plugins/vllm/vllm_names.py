"""Names of vLLM that are private, or that not every release has."""

from __future__ import annotations

from collections.abc import Sequence

import vllm.exceptions
from vllm.sampling_params import SamplingParams

__all__ = ["REQUEST_ERRORS", "set_bad_words"]

# What the library raises for parameters that it does not take. 0.25 has no class for them.
REQUEST_ERRORS: tuple[type[Exception], ...] = (
    getattr(vllm.exceptions, "VLLMClientError", ValueError),
    ValueError,
    TypeError,
)


def set_bad_words(params: SamplingParams, bad_words: Sequence[Sequence[int]]) -> None:
    """Set token ids as bad words. The library's own parameter takes only texts."""
    params._bad_words_token_ids = [list(word) for word in bad_words]
