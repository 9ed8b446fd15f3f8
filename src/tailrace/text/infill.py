"""Prompts whose answer belongs between two texts, for models that were trained on such prompts (fill in the middle).

A model marks the parts of such a prompt with tokens of its own. The names of these tokens are the same in all models of
a family, so they are found by name. Sources: Bavarian et al. 2022 (the order prefix, suffix, middle), the reports on
Qwen2.5-Coder (arXiv 2409.12186) and StarCoder2 (arXiv 2402.19173) for other files, mistral-common for Codestral.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tailrace.types import Infill

__all__ = ["InfillTokens", "find_infill_tokens", "infill_ids"]

# Tokens before the text before the gap, before the text after it, and before the answer, by family.
_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder and later, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder2, Granite's code models, Refact
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek-Coder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM 4.5
)
_CODESTRAL = ("[PREFIX]", "[SUFFIX]")  # the text after the gap comes first, and no token comes before the answer
_REPOSITORY = ("<|repo_name|>", "<|fim_repo|>", "<reponame>", "<repo_name>")
_FILE = ("<|file_sep|>", "<file_sep>")
_END = ("\u2581<EOT>", "<EOT>", "<|file_separator|>")  # CodeLlama, CodeGemma; others end as usual
_PADDING = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>")
_QUARTERS_BEFORE = 3  # of a prompt that is too long: the text before the gap matters more


class InfillTokens(NamedTuple):
    """The ids of a model's tokens for such prompts; None for those that it does not have."""

    before: int
    after: int
    middle: int | None
    repository: int | None
    file: int | None
    ends: tuple[int, ...]  # the model ends an answer with one of these, besides its usual ends


def find_infill_tokens(find: Callable[[str], int | None]) -> InfillTokens | None:
    """Return the tokens of a vocabulary, or None if the model has none. `find` returns the id of a token's text."""
    repository, file, padding, end = (
        next((found for name in names if (found := find(name)) is not None), None)
        for names in (_REPOSITORY, _FILE, _PADDING, _END)
    )
    ends = tuple(one for one in (padding, repository, file, end) if one is not None)
    for names in _FAMILIES:
        before, after, middle = map(find, names)
        if before is not None and after is not None and middle is not None:
            return InfillTokens(before, after, middle, repository, file, ends)
    before, after = map(find, _CODESTRAL)
    if before is None or after is None:
        return None
    return InfillTokens(before, after, None, repository, file, ends)


def infill_ids(
    asked: Infill, tokens: InfillTokens, encode: Callable[[str], list[int]], *, room: int | None = None
) -> list[int]:
    """Return the ids of a prompt, without a beginning-of-sequence token. `encode` encodes plain text.

    With `room`, the prompt has at most so many tokens: the beginning of the other files is left out first, then what is
    farthest from the gap.
    """
    before, after = encode(asked.before), encode(asked.after)
    if room is not None:
        room = max(room - 3, 0)  # the tokens that mark the parts
        num_before = min(len(before), max(-(-room * _QUARTERS_BEFORE // 4), room - len(after)))
        before = before[len(before) - num_before :]
        after = after[: room - num_before]
        room -= len(before) + len(after)
    others = _others(asked, tokens, encode)
    if room is not None:
        others = others[max(len(others) - room, 0) :]
    if tokens.middle is None:
        return [*others, tokens.after, *after, tokens.before, *before]
    return [*others, tokens.before, *before, tokens.after, *after, tokens.middle]


def _others(asked: Infill, tokens: InfillTokens, encode: Callable[[str], list[int]]) -> list[int]:
    """Return the ids of the other files: as in a repository, if the model has a token between files."""
    if not asked.files:
        return []
    if tokens.file is None:
        return [token_id for _, text in asked.files for token_id in encode(f"{text}\n\n")]
    ids = [] if tokens.repository is None else [tokens.repository, *encode("project\n")]
    for name, text in asked.files:
        ids += [tokens.file, *encode(f"{name}\n{text}\n")]
    return [*ids, tokens.file, *encode("this file\n")]
