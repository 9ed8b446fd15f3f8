"""Sequences whose grammar must be compiled start one after the other; all others start at once."""

from __future__ import annotations

import pytest

from tailrace.engines.interface import Sequence
from tailrace.engines.openvino import turns as openvino_turns
from tailrace.engines.openvino.turns import Turns
from tailrace.engines.schedule import Schedule
from tailrace.types import Grammar, Sampling


def _sequence(number: int, regex: str = "") -> Sequence:
    return Sequence(number, (1, 2), Sampling(seed=0, max_tokens=2, grammar=Grammar("regex", regex) if regex else None))


def _ids(taken: list[Sequence]) -> list[int]:
    return [sequence.sequence_id for sequence in taken]


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    monkeypatch.setattr(openvino_turns, "PAUSES", 1e9)  # a pause has no end here
    return Turns()


def test_sequences_without_a_grammar_start_at_once(turns: Turns) -> None:
    for number in range(3):
        turns.add(_sequence(number))
    assert _ids(turns.take(is_alone=False)) == [0, 1, 2]
    assert turns.take(is_alone=False) == []


def test_one_grammar_is_compiled_at_a_time(turns: Turns) -> None:
    for number in range(3):
        turns.add(_sequence(number, f"a{number}"))
    turns.add(_sequence(3))
    assert _ids(turns.take(is_alone=False)) == [3, 0]
    assert turns.take(is_alone=True) == []  # the first has no tokens yet
    turns.on_delta(3, 1, 0.1)
    assert turns.take(is_alone=True) == []
    turns.on_delta(0, 1, 0.1)
    assert turns.take(is_alone=False) == []  # the others have a pause
    assert _ids(turns.take(is_alone=True)) == [1]  # for which nobody is there


def test_a_pause_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_turns, "PAUSES", 0.0)
    turns = Turns()
    turns.add(_sequence(0, "a"))
    turns.add(_sequence(1, "b"))
    assert _ids(turns.take(is_alone=False)) == [0]
    turns.on_delta(0, 1, 0.1)
    assert _ids(turns.take(is_alone=False)) == [1]


def test_a_known_grammar_does_not_wait(turns: Turns) -> None:
    for number in range(3):
        turns.add(_sequence(number, "a"))
    assert _ids(turns.take(is_alone=False)) == [0]
    turns.on_delta(0, 1, 0.1)
    assert _ids(turns.take(is_alone=False)) == [1, 2]
    turns.add(_sequence(3, "a"))
    assert _ids(turns.take(is_alone=False)) == [3]


def test_an_aborted_sequence_blocks_no_other(turns: Turns) -> None:
    for number in range(4):
        turns.add(_sequence(number, f"a{number}"))
    turns.drop(1)
    assert _ids(turns.take(is_alone=False)) == [0]
    turns.drop(0)
    assert _ids(turns.take(is_alone=False)) == [2]
    turns.drop(2)
    turns.drop(3)
    turns.drop(7)
    assert turns.take(is_alone=True) == []


def test_known_grammars_are_dropped_later(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_turns, "MAX_KNOWN", 1)
    for number, regex in enumerate(("a", "b", "a")):
        turns.add(_sequence(number, regex))
        assert _ids(turns.take(is_alone=True)) == [number]
        turns.on_delta(number, 1, 0.1)
    turns.add(_sequence(3, "b"))
    assert turns.take(is_alone=False) == []


def _replay(number: int, *lengths: int) -> Sequence:
    return Sequence(number, (1, 2), Sampling(seed=0, max_tokens=9), Schedule(lengths))


def test_a_replay_runs_alone_until_past_its_lone_tokens(turns: Turns) -> None:
    turns.add(_replay(0, 4))
    turns.add(_replay(1, 1, 2))
    assert _ids(turns.take(is_alone=True)) == [1]
    for num_tokens in (1, 2):
        turns.on_delta(1, num_tokens, 0.1)
        assert turns.take(is_alone=False) == []
    turns.on_delta(1, 3, 0.1)
    assert _ids(turns.take(is_alone=False)) == [0]


def test_others_do_not_wait_for_a_replay_that_has_ended(turns: Turns) -> None:
    turns.add(_replay(0, 1, 2))
    turns.add(_replay(1))
    assert _ids(turns.take(is_alone=True)) == [0]
    turns.drop(0)
    assert _ids(turns.take(is_alone=False)) == [1]


def test_others_wait_only_for_a_limited_time(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_turns, "MAX_RESERVED_S", 0.0)
    turns.add(_replay(0, 1, 2))
    turns.add(_replay(1))
    assert _ids(turns.take(is_alone=True)) == [0]
    assert _ids(turns.take(is_alone=False)) == [1]
