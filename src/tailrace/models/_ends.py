"""Tokens that end a turn or a text whatever `eos_token_id` says, since files that name one of the two are common."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["END_TOKENS", "is_end"]

# As llama.cpp knows them, without those that part files and pieces of code that are to be filled in.
END_TOKENS = frozenset(
    (
        *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[e~["),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>"),
    )
)

# The first is no end where all of the others are there: gpt-oss and Solar end messages of an answer so, and Gemma 4 has
# it from HTML.
_UNLESS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
)


def is_end(token: str, control_tokens: Collection[str]) -> bool:
    """Whether a control token ends an answer, given all that the model has."""
    return token in END_TOKENS and not any(token == but and others.issubset(control_tokens) for but, others in _UNLESS)
