"""Prompts whose answer belongs between two texts: which tokens a model has for them, and their order."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tailrace.text.infill import InfillTokens, find_infill_tokens, infill_ids
from tailrace.types import Infill

QWEN = {"<|fim_prefix|>": 1, "<|fim_middle|>": 2, "<|fim_suffix|>": 3, "<|fim_pad|>": 4, "<|repo_name|>": 5}
QWEN |= {"<|file_sep|>": 6}
STARCODER = {"<fim_prefix>": 1, "<fim_middle>": 2, "<fim_suffix>": 3}
SANTACODER = {"<fim-prefix>": 1, "<fim-middle>": 2, "<fim-suffix>": 3, "<fim-pad>": 4}
DEEPSEEK = {"<\uff5cfim\u2581begin\uff5c>": 1, "<\uff5cfim\u2581end\uff5c>": 2, "<\uff5cfim\u2581hole\uff5c>": 3}
CODELLAMA = {"\u2581<PRE>": 1, "\u2581<MID>": 2, "\u2581<SUF>": 3, "\u2581<EOT>": 4}
CODELLAMA_PLAIN = {"<PRE>": 1, "<MID>": 2, "<SUF>": 3, "<EOT>": 4}
GLM = {"<|code_prefix|>": 1, "<|code_middle|>": 2, "<|code_suffix|>": 3}
CODEGEMMA = {"<|fim_prefix|>": 1, "<|fim_middle|>": 2, "<|fim_suffix|>": 3, "<|file_separator|>": 4}
CODESTRAL = {"[PREFIX]": 1, "[SUFFIX]": 3}


def encode(text: str) -> list[int]:
    """Return one id for each character, all above those of the tokens."""
    return [100 + ord(char) for char in text]


def tokens_of(vocabulary: Mapping[str, int]) -> InfillTokens:
    found = find_infill_tokens(vocabulary.get)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("vocabulary", "expected"),
    [
        (QWEN, [1, *encode("ab"), 3, *encode("yz"), 2]),
        (STARCODER, [1, *encode("ab"), 3, *encode("yz"), 2]),
        (SANTACODER, [1, *encode("ab"), 3, *encode("yz"), 2]),
        (DEEPSEEK, [1, *encode("ab"), 3, *encode("yz"), 2]),
        (CODELLAMA, [1, *encode("ab"), 3, *encode("yz"), 2]),
        (CODELLAMA_PLAIN, [1, *encode("ab"), 3, *encode("yz"), 2]),
        (GLM, [1, *encode("ab"), 3, *encode("yz"), 2]),
        (CODEGEMMA, [1, *encode("ab"), 3, *encode("yz"), 2]),
        (CODESTRAL, [3, *encode("yz"), 1, *encode("ab")]),
    ],
)
def test_the_order_of_a_prompt(vocabulary: dict[str, int], expected: list[int]) -> None:
    assert infill_ids(Infill("ab", "yz"), tokens_of(vocabulary), encode) == expected


def test_other_files_are_a_repository() -> None:
    prompt = infill_ids(Infill("a", "z", (("x.py", "one"),)), tokens_of(QWEN), encode)

    here = [1, *encode("a"), 3, *encode("z"), 2]
    assert prompt == [5, *encode("project\n"), 6, *encode("x.py\none\n"), 6, *encode("this file\n"), *here]


def test_other_files_without_a_token_between_files_are_text() -> None:
    prompt = infill_ids(Infill("a", "z", (("x.py", "one"), ("y.py", "two"))), tokens_of(STARCODER), encode)

    assert prompt == [*encode("one\n\ntwo\n\n"), 1, *encode("a"), 3, *encode("z"), 2]


def test_an_answer_also_ends_with_the_tokens_between_files() -> None:
    assert set(tokens_of(QWEN).ends) == {4, 5, 6}


@pytest.mark.parametrize(
    ("vocabulary", "ends"),
    [
        (SANTACODER, (4,)),
        (CODELLAMA, (4,)),
        (CODELLAMA_PLAIN, (4,)),
        (CODEGEMMA, (4,)),
        (DEEPSEEK, ()),
        (GLM, ()),
        (CODESTRAL, ()),
    ],
)
def test_an_answer_ends_with_the_tokens_that_a_family_has_for_it(
    vocabulary: dict[str, int], ends: tuple[int, ...]
) -> None:
    assert tokens_of(vocabulary).ends == ends


@pytest.mark.parametrize("missing", ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
def test_a_model_without_one_of_the_three_tokens_has_none(missing: str) -> None:
    assert find_infill_tokens({name: found for name, found in QWEN.items() if name != missing}.get) is None


@pytest.mark.parametrize("room", [3, 4, 7, 10, 20, 30, 60, 1000])
def test_a_long_prompt_keeps_what_is_nearest_to_the_gap(room: int) -> None:
    before, after = "abcdefghijkl", "mnopqrstuvwx"
    tokens = tokens_of(STARCODER)

    prompt = infill_ids(Infill(before, after, (("x", "0123456789" * 3),)), tokens, encode, room=room)

    assert len(prompt) <= room
    start, gap, end = map(prompt.index, (1, 3, 2))
    others, kept_before, kept_after = prompt[:start], prompt[start + 1 : gap], prompt[gap + 1 : end]
    assert encode(before)[len(before) - len(kept_before) :] == kept_before
    assert encode(after)[: len(kept_after)] == kept_after
    is_whole = len(kept_before) + len(kept_after) == len(before) + len(after)
    assert is_whole or not others  # other files are left out first
    assert len(kept_before) >= len(kept_after) or len(kept_before) == len(before)
