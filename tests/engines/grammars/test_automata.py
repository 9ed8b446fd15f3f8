"""Automata accept what Python's regular expressions match, and are small or refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.engines.grammars.automata import MAX_STATES, Automaton, GrammarError, of_choices, of_regex

_PATTERNS = [
    "a", "()", "a|b", "(a|bc)*d", "(?:ab)+", "a?b{2}c{1,3}", "a{2,}", "[a-c]", "[^a-c]b", ".", "..?", r"\d\D\w\W\s\S",
    r"[\d\-x]+", r"[^\w]", r"a\.b|\\|\n", "^ab$", "a|b$", r"\$", r"a\\$", "(a*)*b", "([^,]*,?)*;", r"(\w+\s?)+\.",
    "((a|b)*(a|b)*)*c", "[ab]*a[ab]{4}", ".*z.{3}", "a*?b+?c??", "(a|ab)(c|bcd)", "[a-]", "[]]".replace("]]", r"\]]"),
    "}", "]", "é|[à-ü]+", "(a{2}){2}",
]  # fmt: skip
_LETTERS = "abcdxyz,; .-\\\n$019éà]}_"


def takes(automaton: Automaton, text: str) -> bool:
    state = 0
    for sign in text:
        targets = [
            target for ranges, target in automaton.moves[state] if any(low <= ord(sign) <= high for low, high in ranges)
        ]
        assert len(targets) <= 1  # which is what it is for
        if not targets:
            return False
        (state,) = targets
    return automaton.accepting[state]


@pytest.mark.parametrize("pattern", _PATTERNS)
@settings(max_examples=40)
@given(st.text(_LETTERS, max_size=12))
def test_it_matches_what_the_pattern_matches(pattern: str, text: str) -> None:
    plain = re.sub(r"^\^|(?<!\\)\$$", "", pattern)
    assert takes(of_regex(pattern), text) == (re.fullmatch(plain, text, re.ASCII) is not None)


@pytest.mark.parametrize("pattern", _PATTERNS)
def test_it_matches_texts_made_from_the_pattern(pattern: str) -> None:
    @settings(max_examples=15)
    @given(st.from_regex(re.compile(re.sub(r"^\^|(?<!\\)\$$", "", pattern), re.ASCII), fullmatch=True))
    def taken(text: str) -> None:
        assert takes(of_regex(pattern), text) or "\0" in text

    taken()


@given(st.lists(st.text(_LETTERS, min_size=1, max_size=6), min_size=1, max_size=8), st.text(_LETTERS, max_size=6))
def test_choices(texts: list[str], other: str) -> None:
    automaton = of_choices(texts)
    assert all(takes(automaton, text) for text in texts)
    assert takes(automaton, other) == (other in texts)


@pytest.mark.parametrize(
    "pattern",
    [
        ".*z.{13}",
        "[ab]*a[ab]{16}",
        ".*a.{64}",
        "(.*a.{20}|.*b.{19})c",
        "((a?){60}){60}",
        "(((((){64}){64}){64}){64}){64}a",
    ],
)
def test_patterns_with_too_many_states_are_refused(pattern: str) -> None:
    with pytest.raises(GrammarError, match=r"states|too much time|too long"):
        of_regex(pattern)


@pytest.mark.parametrize("pattern", [r"[^\s\S]", r"a[^\d\D]b"])
def test_a_pattern_without_a_text_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError, match="no answer could conform"):
        of_regex(pattern)


@pytest.mark.parametrize(
    "pattern", ["(", ")", "(a", "a)", "[", "[a", "*", "a**", "+a", r"\b", r"\1", "\\", "(?=a)", "a{3,2}", "a{0}",
                "[b-a]", "a^b", "a$b", r"[\d-z]", "\0", "[\0]", r"\x41"]
)  # fmt: skip
def test_unknown_syntax_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError) as refused:
        of_regex(pattern)
    assert pattern not in str(refused.value) or len(pattern) < 2


def test_no_text_has_a_nul() -> None:
    for pattern in (".", r"\D", r"\W", r"\S", "[^a]"):
        assert not takes(of_regex(pattern), "\0")


def test_long_repetitions_have_few_states() -> None:
    assert len(of_regex("[a-z ]{1,40}").moves) == 41
    assert len(of_regex("x" * 2000).moves) == 2001 < MAX_STATES
    assert len(of_regex(r"([^,]*,?)*;").moves) <= 4
