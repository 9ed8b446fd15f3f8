from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.text import Detokenizer, Tokenizer


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    parts: list[list[int]] = []
    for size in sizes:
        parts.append(ids[:size])
        ids = ids[size:]
    return [*parts, ids]


sizes = st.lists(st.integers(0, 4), max_size=20)


@given(text=st.binary(max_size=40), sizes=sizes)
def test_any_bytes_in_any_pieces(text: bytes, sizes: list[int], byte_level: Tokenizer) -> None:
    ids = [byte_level.pieces.index(bytes([byte])) for byte in text]
    detokenizer = Detokenizer(byte_level)
    shown = "".join(detokenizer.push(part) for part in cut(ids, sizes)) + detokenizer.flush()
    assert shown == text.decode("utf-8", "replace")


@given(data=st.data(), sizes=sizes)
def test_any_tokens(data: st.DataObject, sizes: list[int], both: Tokenizer) -> None:
    ids = data.draw(st.lists(st.integers(-3, both.vocab_size + 3), max_size=30))
    shown_ids = [i for i in ids if 0 <= i < both.vocab_size and i not in both.special_ids]
    detokenizer = Detokenizer(both)
    shown = "".join(detokenizer.push(part) for part in cut(ids, sizes)) + detokenizer.flush()
    assert shown == b"".join(both.pieces[i] for i in shown_ids).decode("utf-8", "replace")


@given(text=st.text(max_size=20))
def test_valid_text_is_sent_as_soon_as_it_is_complete(text: str, byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    for char in text:
        *before, last = (byte_level.pieces.index(bytes([byte])) for byte in char.encode())
        assert [detokenizer.push((i,)) for i in before] == [""] * len(before)
        assert detokenizer.push((last,)) == char
    assert detokenizer.flush() == ""


def test_half_a_character_waits_also_over_a_special_token(byte_level: Tokenizer) -> None:
    first, last = byte_level.pieces.index(b"\xe6\x97"), byte_level.pieces.index(b"\xa5")
    detokenizer = Detokenizer(byte_level)
    assert detokenizer.push([first]) == ""
    assert detokenizer.push([byte_level.control_tokens["<|im_end|>"]]) == ""
    assert detokenizer.push([-1]) == detokenizer.push([10**9]) == detokenizer.push([]) == ""
    assert detokenizer.push([last]) == "日"


def test_invalid_bytes_are_replaced_as_soon_as_possible(byte_level: Tokenizer) -> None:
    lead, ascii_token = byte_level.pieces.index(b"\xe6"), byte_level.pieces.index(b"hi")
    detokenizer = Detokenizer(byte_level)
    assert detokenizer.push([byte_level.pieces.index(b"\xff")]) == "\ufffd"
    assert detokenizer.push([lead]) == ""
    assert detokenizer.push([ascii_token]) == "\ufffdhi"
    assert detokenizer.push([ascii_token]) == "hi"


def test_flush_replaces_the_rest_and_resets(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    assert detokenizer.flush() == ""
    assert detokenizer.push([byte_level.pieces.index(b"\xe6\x97")]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert detokenizer.push([byte_level.pieces.index(b"hi")]) == "hi"


def test_the_space_of_an_answer_s_first_word_is_kept(sentencepiece: Tokenizer) -> None:
    assert Detokenizer(sentencepiece).push([sentencepiece.pieces.index(b" hi")]) == " hi"
