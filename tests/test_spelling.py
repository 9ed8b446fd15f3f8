from __future__ import annotations

from tailrace.spelling import did_you_mean

KNOWN = ("max_tokens", "min_p", "temperature")


def test_what_is_close_is_named() -> None:
    assert did_you_mean("max_token", KNOWN) == " Did you mean max_tokens?"
    assert did_you_mean("Temprature", KNOWN) == " Did you mean temperature?"


def test_what_is_not_close_is_not() -> None:
    assert did_you_mean("frobnicate", KNOWN) == ""
    assert did_you_mean("", ()) == ""
