"""A pattern for a range of integers matches each of them and no other text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.engines.grammars.integers import pattern_between


@given(st.integers(-1200, 1200), st.integers(0, 1200))
def test_each_number_and_no_other(low: int, width: int) -> None:
    pattern = re.compile(pattern_between(low, low + width))
    for number in range(low - 12, low + width + 13):
        assert (pattern.fullmatch(str(number)) is not None) == (low <= number <= low + width), number


@given(st.integers(-(10**13), 10**13), st.integers(0, 10**13), st.integers(-(10**13), 10**13))
def test_large_numbers(low: int, width: int, number: int) -> None:
    pattern = re.compile(pattern_between(low, low + width))
    for each in (low - 1, low, low + width, low + width + 1, number):
        assert (pattern.fullmatch(str(each)) is not None) == (low <= each <= low + width), each


@pytest.mark.parametrize("text", ["", "-", "-0", "00", "007", "1.0", "+1"])
def test_other_ways_to_write_a_number(text: str) -> None:
    assert re.fullmatch(pattern_between(-100, 100), text) is None


def test_an_empty_range() -> None:
    with pytest.raises(ValueError, match="no number"):
        pattern_between(3, 2)
