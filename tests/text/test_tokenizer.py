from __future__ import annotations

import json
import threading

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import ModelError, RequestError
from tailrace.text import Detokenizer, Tokenizer

control_text = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<", "</s>", "<s>", "[INST]", " ", "[INST"]
)
texts = st.lists(
    st.text(max_size=8) | control_text | st.sampled_from(["hi", " hi", "<think>", "é!", "12", "日本"])
).map("".join)


@given(text=texts)
def test_special_encoding_is_the_library_s_own(
    text: str, byte_level: Tokenizer, byte_level_library: tokenizers.Tokenizer
) -> None:
    assert byte_level.encode(text, special=True) == byte_level_library.encode(text, add_special_tokens=False).ids


@given(text=texts)
def test_special_encoding_is_the_library_s_own_with_sentencepiece(
    text: str, sentencepiece: Tokenizer, sentencepiece_library: tokenizers.Tokenizer
) -> None:
    assert sentencepiece.encode(text, special=True) == sentencepiece_library.encode(text, add_special_tokens=False).ids


@given(text=texts)
def test_plain_text_never_gives_a_special_token(text: str, both: Tokenizer) -> None:
    assert both.special_ids.isdisjoint(both.encode(text, special=False))


@given(text=texts)
def test_joined_pieces_are_the_text(text: str, byte_level: Tokenizer) -> None:
    for special in (True, False):
        ids = byte_level.encode(text, special=special)
        assert b"".join(byte_level.pieces[i] for i in ids) == text.encode()


@given(text=texts)
def test_joined_sentencepiece_pieces_are_the_text_after_a_space(text: str, sentencepiece: Tokenizer) -> None:
    shown = b"".join(sentencepiece.pieces[i] for i in sentencepiece.encode(text, special=False)).decode()
    # "▁" is how this family writes a space, so text that has one comes back with a space.
    assert shown in (text.replace("\u2581", " "), " " + text.replace("\u2581", " "))


@given(text=texts)
def test_decoding_is_the_library_s_own(
    text: str, byte_level: Tokenizer, byte_level_library: tokenizers.Tokenizer
) -> None:
    ids = byte_level.encode(text.replace("é!", ""), special=True)
    detokenizer = Detokenizer(byte_level)
    assert detokenizer.push(ids) + detokenizer.flush() == byte_level_library.decode(ids, skip_special_tokens=True)


@given(text=texts)
def test_at_least_tokens_is_a_lower_bound(text: str, both: Tokenizer) -> None:
    for special in (True, False):
        assert both.at_least_tokens(text) <= len(both.encode(text, special=special))


def test_at_least_tokens_is_above_0_if_possible(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert byte_level.max_piece_bytes == len("<|endoftext|>")
    assert byte_level.at_least_tokens("é" * 13) == 2
    assert byte_level.at_least_tokens("") == 0
    assert sentencepiece.at_least_tokens("hi " * 100) == 0  # [INST] swallows any amount of whitespace


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "NFC"}),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}]}),
        ("pre_tokenizer", {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}),
    ],
)
def test_at_least_tokens_is_0_when_a_step_can_drop_text(part: str, value: object, byte_level_json: str) -> None:
    spec = json.loads(byte_level_json)
    spec[part] = value
    assert Tokenizer.from_json(json.dumps(spec)).at_least_tokens("hi " * 100) == 0


def test_at_least_tokens_ignores_bytes_without_a_token(byte_level_json: str) -> None:
    spec = json.loads(byte_level_json)
    lost = chr(0x100 + 4)  # how byte 0x04 is written
    moved = spec["model"]["vocab"].pop(lost)
    spec["model"]["vocab"]["unused"] = moved
    tokenizer = Tokenizer.from_json(json.dumps(spec))
    assert tokenizer.encode("\x04" * 1000, special=True) == []
    assert tokenizer.at_least_tokens("\x04" * 1000) == 0
    assert tokenizer.at_least_tokens("\x04h" * 1000) > 0


def test_merges_cannot_make_a_special_token_of_plain_text(sentencepiece: Tokenizer) -> None:
    end = sentencepiece.control_tokens["</s>"]
    assert sentencepiece.encode("hi</s>", special=True)[-1] == end
    plain = sentencepiece.encode("hi</s>", special=False)
    assert end not in plain
    assert b"".join(sentencepiece.pieces[i] for i in plain) == b" hi</s>"


def test_control_tokens_given_by_id(byte_level: Tokenizer) -> None:
    end = byte_level.control_tokens["<|im_end|>"]
    ids = byte_level.encode_parts(["hi<|im_end|>", end, "", end, " hi"])
    assert [i for i in ids if i in byte_level.special_ids] == [end, end]
    assert b"".join(byte_level.pieces[i] for i in ids) == b"hi<|im_end|><|im_end|><|im_end|> hi"


def test_control_tokens_given_by_id_keep_their_strip_and_the_first_word_its_space(
    sentencepiece: Tokenizer, sentencepiece_library: tokenizers.Tokenizer
) -> None:
    ids = sentencepiece.encode_parts(["hi", sentencepiece.control_tokens["[INST]"], "  \n hi"])
    assert ids == sentencepiece_library.encode("hi[INST]  \n hi", add_special_tokens=False).ids


def test_control_tokens_given_by_id_with_gaps_in_the_vocabulary(byte_level_json: str) -> None:
    spec = json.loads(byte_level_json)
    vocab = spec["model"]["vocab"]
    highest = max(vocab.values())
    for i, token in enumerate(["hi", "Ġhi"]):
        vocab[token] = highest + 3 + 5 * i
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["special"]]
    tokenizer = Tokenizer.from_json(json.dumps(spec))
    assert tokenizer.pieces[highest + 1] == b""
    end = tokenizer.control_tokens["<|im_end|>"]
    assert tokenizer.encode_parts(["hi", end, " hi"]) == tokenizer.encode("hi<|im_end|> hi", special=True)


def test_a_raw_prompt_gets_one_bos(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    (start,) = sentencepiece.bos_ids
    bare = sentencepiece.encode("hi", special=True)
    assert sentencepiece.encode("hi", special=True, bos=True) == [start, *bare]
    assert sentencepiece.encode("<s>hi", special=True, bos=True).count(start) == 1
    assert byte_level.encode("hi", special=True, bos=True) == byte_level.encode("hi", special=True)


def test_truncation_and_padding_in_the_file_are_ignored(
    byte_level_json: str, byte_level_library: tokenizers.Tokenizer
) -> None:
    library = tokenizers.Tokenizer.from_str(byte_level_json)
    library.enable_truncation(max_length=4)
    library.enable_padding(length=4)
    tokenizer = Tokenizer.from_json(library.to_str())
    for text in ("h", "hi hi hi hi hi hi"):
        expected = byte_level_library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, special=True) == expected


def test_added_tokens_are_literal(byte_level: Tokenizer) -> None:
    (think,) = byte_level.encode("<think>", special=False)
    assert byte_level.pieces[think] == b"<think>"
    (accented,) = byte_level.encode("é!", special=True)
    assert byte_level.pieces[accented] == "é!".encode()


def test_byte_and_space_pieces(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.pieces[3 + 0x0A] == b"\n"
    assert sentencepiece.pieces[3 + 0xE6] == b"\xe6"
    assert b" hi" in sentencepiece.pieces


def test_token_text(byte_level: Tokenizer) -> None:
    assert byte_level.token_text(byte_level.control_tokens["<|im_end|>"]) == "<|im_end|>"
    assert byte_level.token_text(byte_level.pieces.index(b"\xe6\x97")) == "\ufffd"
    assert byte_level.token_text(byte_level.pieces.index(b" hi")) == " hi"
    assert byte_level.token_text(-1) == byte_level.token_text(byte_level.vocab_size) == ""


@pytest.mark.parametrize("special", [True, False])
def test_lone_surrogates_are_the_client_s_mistake(special: bool, both: Tokenizer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode") as caught:
        both.encode("a\ud800b", special=special)
    assert caught.value.code == "invalid_request"
    with pytest.raises(RequestError, match="not valid Unicode"):
        both.encode_parts(["\udfff"])


def test_unreadable_json_is_a_model_error() -> None:
    for broken in ("", "{}", "[]", "not json"):
        with pytest.raises(ModelError, match="cannot be read"):
            Tokenizer.from_json(broken)


@pytest.mark.parametrize(
    "decoder", [None, {"type": "CTC", "pad_token": "-", "word_delimiter_token": "+", "cleanup": True}]
)
def test_decoders_without_true_bytes_are_refused(decoder: object, byte_level_json: str) -> None:
    spec = json.loads(byte_level_json)
    spec["decoder"] = decoder
    with pytest.raises(ModelError, match="decoder"):
        Tokenizer.from_json(json.dumps(spec))


def test_threads_share_one_tokenizer(byte_level: Tokenizer) -> None:
    text = "hi<|im_end|> user" * 50
    expected = {special: byte_level.encode(text, special=special) for special in (True, False)}
    wrong: list[bool] = []

    def encode(special: bool) -> None:
        wrong.extend(special for _ in range(50) if byte_level.encode(text, special=special) != expected[special])

    threads = [threading.Thread(target=encode, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
