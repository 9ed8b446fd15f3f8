from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.errors import RequestError
from tailrace.text import StopMatcher

# Two letters, so that stop strings overlap with themselves and each other all the time.
letters = st.text("ab", min_size=1, max_size=5)
stop_sets = st.lists(letters, max_size=4).map(tuple)


def oracle(stops: tuple[str, ...], include: bool, text: str) -> tuple[str, str | None]:
    """Stop a text as defined; returns the shown text and the stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def longest_hold(stops: tuple[str, ...], text: str) -> int:
    """Return how many characters at the end of the text are a proper prefix of a stop string."""
    return max(
        (n for n in range(len(text) + 1) for stop in stops if n < len(stop) and text.endswith(stop[:n])), default=0
    )


@given(stops=stop_sets, include=st.booleans(), parts=st.lists(st.text("abc", max_size=6), max_size=12))
@example(stops=("abab", "b"), include=False, parts=["aba", "b"])
@example(stops=("aab",), include=True, parts=["aaaaab", "aab"])
def test_equals_the_definition_in_any_pieces(stops: tuple[str, ...], include: bool, parts: list[str]) -> None:
    matcher = StopMatcher(stops, include)
    shown, seen, matched = "", "", None
    for part in parts:
        text, stop = matcher.push(part)
        seen += part
        shown += text
        if matched is not None:
            assert (text, stop) == ("", None)
        matched = matched or stop
        expected, expected_stop = oracle(stops, include, seen)
        assert matched == expected_stop
        # Exactly what may be shown is shown: never something to take back, never less.
        hold = longest_hold(stops, seen) if matched is None and not include else 0
        assert shown == expected[: len(expected) - hold]
    shown += matcher.flush()
    assert (shown, matched) == oracle(stops, include, "".join(parts))


def test_text_that_cannot_become_a_stop_string_is_released() -> None:
    matcher = StopMatcher(("<end>",), include=False)
    assert matcher.push("a<e") == ("a", None)
    assert matcher.push("x") == ("<ex", None)
    assert matcher.push("<en") == ("", None)
    assert matcher.push("d>tail") == ("", "<end>")
    assert matcher.push("more") == ("", None)
    assert matcher.flush() == ""


def test_include_keeps_the_stop_string_and_nothing_after_it() -> None:
    matcher = StopMatcher(("\n\n",), include=True)
    assert matcher.push("a\n") == ("a\n", None)  # nothing will have to be taken back
    assert matcher.push("\nb") == ("\n", "\n\n")
    assert matcher.push("c") == ("", None)


def test_flush_returns_held_back_text_once() -> None:
    matcher = StopMatcher(("stop",), include=False)
    assert matcher.push("sto") == ("", None)
    assert matcher.flush() == "sto"
    assert matcher.flush() == ""


def test_without_stop_strings_text_passes() -> None:
    assert StopMatcher((), include=False).push("a") == ("a", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        StopMatcher(("a", ""), include=False)
    assert caught.value.param == "stop"


def test_a_repetitive_stop_string_holds_no_more_than_itself() -> None:
    matcher = StopMatcher(("a" * 300,), include=False)
    assert matcher.push("a" * 299) == ("", None)
    assert matcher.push("b") == ("a" * 299 + "b", None)
    assert matcher.push(("a" * 299 + "b") * 200) == (("a" * 299 + "b") * 200, None)
    assert matcher.push("a" * 301) == ("", "a" * 300)
