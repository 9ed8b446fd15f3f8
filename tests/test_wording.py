from __future__ import annotations

from tailrace.wording import did_you_mean

KNOWN = ("max_tokens", "min_p", "temperature")


def test_close_words_are_suggested() -> None:
    assert did_you_mean("max_token", KNOWN) == " Did you mean max_tokens?"
    assert did_you_mean("Temprature", KNOWN) == " Did you mean temperature?"


def test_other_words_are_not_suggested() -> None:
    assert did_you_mean("frobnicate", KNOWN) == ""
    assert did_you_mean("", ()) == ""
