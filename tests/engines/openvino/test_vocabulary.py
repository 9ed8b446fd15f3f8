"""The number of steps in which the library compiles a grammar."""

from __future__ import annotations

import random

import pytest

from tailrace.engines.grammars.automata import Automaton, of_choices, of_regex
from tailrace.engines.grammars.ebnf import to_rules
from tailrace.engines.openvino.vocabulary import TokenTree
from tailrace.types import Grammar

_MANY = 10**9


def _next(automaton: Automaton, state: int, character: str) -> int | None:
    for ranges, target in automaton.moves[state]:
        if any(low <= ord(character) <= high for low, high in ranges):
            return target
    return None


def _slowly(tokens: list[str], automaton: Automaton) -> int:
    """Try each beginning of a token once, from each state."""
    beginnings = {token[:end] for token in tokens for end in range(1, len(token) + 1)}
    count = 0
    for start in range(len(automaton.moves)):
        for beginning in beginnings:
            state: int | None = start
            for character in beginning[:-1]:
                state = None if state is None else _next(automaton, state, character)
            count += state is not None
    return count


@pytest.mark.parametrize("regex", ["a", "[a-c]{1,9}", "(a|bc)*é?", ".*a.{3}", "x", r"[^b]+\d"])
def test_each_beginning_is_tried_once(regex: str) -> None:
    draw = random.Random(7)
    tokens = ["".join(draw.choices("abcé1 ", k=draw.randint(1, 6))) for _ in range(200)]
    automaton = of_regex(regex)
    assert TokenTree(token.encode() for token in tokens).num_steps(automaton, _MANY) == _slowly(tokens, automaton)


def test_counting_stops_above_the_limit() -> None:
    tree = TokenTree(f"{number}".encode() for number in range(5000))
    automaton = of_regex(r"\d{1,100}")
    whole = tree.num_steps(automaton, _MANY)
    assert tree.num_steps(automaton, whole) == whole
    assert 1000 < tree.num_steps(automaton, 1000) < whole


def test_unusual_tokens() -> None:
    """Parts of characters, none at all, and long ones."""
    tree = TokenTree([b"", b"\xc3", b"\x00", "é".encode(), b" " * 500, b"a"])
    assert tree.num_steps(of_choices(["é"]), _MANY) == 4 + 4
    assert tree.num_steps(of_regex(" *"), _MANY) == 4 + 31
    assert TokenTree([]).num_steps(of_regex("a"), _MANY) == 0


def test_bounded_strings_have_their_states() -> None:
    def num_states(schema: str) -> int:
        return sum(len(automaton.moves) for automaton in to_rules(Grammar("json_schema", schema)).automata)

    assert num_states('{"type":"string","maxLength":40}') == 41
    assert num_states('{"type":"string","minLength":40}') == 42
    assert num_states('{"type":"string","pattern":"[a-z]{40}"}') == 41
    assert num_states('{"type":"boolean"}') == 0
