from __future__ import annotations

import unicodedata

from tailrace.terminal.text import printable_text


def test_no_control_character_is_left_but_line_ends_and_tabs() -> None:
    every = "".join(map(chr, range(0x500)))
    left = {character for character in printable_text(every) if unicodedata.category(character) == "Cc"}
    assert left == {"\n", "\t"}


def test_what_is_taken_out_can_be_seen() -> None:
    assert printable_text("a\x1b]0;title\x07b\x9b2Jc\x7f") == "a␛]0;title␇b\ufffd2Jc␡"
    assert printable_text("first\r\nsecond") == "first\nsecond"
    assert printable_text("Grüße, \u05e9\u05dc\u05d5\u05dd \U0001f30a") == "Grüße, \u05e9\u05dc\u05d5\u05dd \U0001f30a"
