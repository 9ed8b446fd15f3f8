from __future__ import annotations

import unicodedata

from tailrace.wording import did_you_mean, printable_text

KNOWN = ("max_tokens", "min_p", "temperature")


def test_close_words_are_suggested() -> None:
    assert did_you_mean("max_token", KNOWN) == " Did you mean max_tokens?"
    assert did_you_mean("Temprature", KNOWN) == " Did you mean temperature?"


def test_other_words_are_not_suggested() -> None:
    assert did_you_mean("frobnicate", KNOWN) == ""
    assert did_you_mean("", ()) == ""


def test_only_line_ends_and_tabs_are_left_of_control_characters() -> None:
    every = "".join(map(chr, range(0x500)))
    left = {character for character in printable_text(every) if unicodedata.category(character) == "Cc"}
    assert left == {"\n", "\t"}


def test_removed_characters_are_visible() -> None:
    assert printable_text("a\x1b]0;title\x07b\x9b2Jc\x7f") == "a␛]0;title␇b\ufffd2Jc␡"
    assert printable_text("first\r\nsecond") == "first\nsecond"
    assert printable_text("Grüße, \u05e9\u05dc\u05d5\u05dd \U0001f30a") == "Grüße, \u05e9\u05dc\u05d5\u05dd \U0001f30a"
