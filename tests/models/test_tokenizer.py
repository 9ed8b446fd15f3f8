"""Tokenizers from GGUF files, compared with llama.cpp's."""

from __future__ import annotations

import random
import tempfile
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.models.tiny_llama import (
    CONTROL,
    CORPUS,
    NORMAL,
    USER_DEFINED,
    Oracle,
    Values,
    byte_level,
    gemma4,
    sentencepiece,
    write_llama,
)

from tailrace.errors import ModelError
from tailrace.models.pre_tokenizers import PRE_TOKENIZERS
from tailrace.models.resolve import read_card
from tailrace.text import Detokenizer, Tokenizer

SPELLINGS = [
    "<s>",
    "</s>",
    "<unk>",
    "<|end|>",
    "<tool>",
    "<0x0A>",
    "<|im_end|>",
    "\u2581",
    "   ",
    "\n\n",
    "日本語",
    "🎉",
]

texts = st.lists(
    st.text(max_size=12)
    | st.sampled_from(SPELLINGS)
    | st.builds(
        lambda line, at, size: CORPUS[line][at : at + size], st.integers(0, 2), st.integers(0, 90), st.integers(0, 30)
    )
    | st.builds(lambda char, count: char * count, st.sampled_from(" =-.\n"), st.integers(0, 20)),
    max_size=5,
).map("".join)


def read(path: Path) -> Tokenizer:
    return Tokenizer.from_json(read_card(path, "tiny").tokenizer_json)


@contextmanager
def both(path: Path, values: Values, name: str = "tiny") -> Iterator[tuple[Tokenizer, Oracle]]:
    with tempfile.TemporaryDirectory() as folder:
        yield read(write_llama(path, values, name)), Oracle(path, folder)


SENTENCEPIECE = {
    "llama": sentencepiece(),
    "gemma": sentencepiece(add_space_prefix=False),
    "gemma4": gemma4(),
}


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_sentencepiece_as_llama_cpp_does_it(tmp_path: Path, kind: str) -> None:
    with both(tmp_path / "tiny.gguf", SENTENCEPIECE[kind]) as (tokenizer, oracle):

        @settings(deadline=None, max_examples=examples(250))
        @given(text=texts, special=st.booleans())
        def same(text: str, special: bool) -> None:
            assert tokenizer.encode(text, special=special) == oracle.ids(text, special=special)

        same()


def _some_texts(count: int) -> list[str]:
    draw = random.Random(7)
    made = []
    for _ in range(count):
        line = draw.choice(CORPUS)
        at = draw.randrange(len(line))
        mixed = "".join(draw.choices("".join(CORPUS), k=draw.randrange(12)))
        made.append(line[at : at + draw.randrange(40)] + draw.choice(["", " ", "\n", mixed]) + draw.choice(SPELLINGS))
    return [unicodedata.normalize("NFC", text) for text in made]


# Where llama.cpp differs from the files of the original models, those are followed: it cuts by other rules what names
# none, reads \\p{Lu} as any letter, and takes digits of other scripts and unbreakable spaces another way.
DIFFER = {"default", "deepseek-llm", "falcon", "kimi-k2", "tiny_aya", "cohere2moe"}
FAMILIES = {id(rules): name for name, rules in PRE_TOKENIZERS.items() if name not in DIFFER}


@pytest.mark.parametrize("pre", sorted(FAMILIES.values()))
def test_each_family_splits_as_in_llama_cpp(tmp_path: Path, pre: str) -> None:
    with both(tmp_path / "tiny.gguf", byte_level(pre)) as (tokenizer, oracle):
        for text in _some_texts(120):
            assert tokenizer.encode(text, special=True) == oracle.ids(text, special=True), text


def _cuts(path: Path, pre: str, text: str) -> list[str]:
    """Return the pieces of a text, as the pre-tokenizer splits it."""
    library = tokenizers.Tokenizer.from_str(read_card(write_llama(path, byte_level(pre)), "tiny").tokenizer_json)
    return [text[start:end] for _, (start, end) in library.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("default", "a 1234 --x", ["a", " 1234", " --", "x"]),
        ("deepseek-llm", "a 123, Ба中文\nb ", ["a", " ", "1", "2", "3", ",", " Ба", "中文", "\n", "b", " "]),
        ("falcon", "a,, 12345 b", ["a", ",,", " ", "123", "45", " b"]),
        ("kimi-k2", "camelCase 中文x 1234", ["camel", "Case", " ", "中文", "x", " ", "123", "4"]),
        ("tiny_aya", "camelCase 12345", ["camel", "Case", " ", "12", "345"]),
    ],
)
def test_families_that_llama_cpp_splits_differently(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    assert _cuts(tmp_path / "tiny.gguf", pre, text) == expected


def test_phi3_s_control_tokens_include_following_spaces(tmp_path: Path) -> None:
    with both(tmp_path / "tiny.gguf", sentencepiece(), "Phi-3-mini") as (tokenizer, oracle):
        for text in ("a<|end|>\n b", "a<s>\n b", "<|end|> <tool>  \n"):
            assert tokenizer.encode(text, special=True) == oracle.ids(text, special=True)
        assert len(tokenizer.encode("<|end|> \n\n", special=True)) == 1


@pytest.mark.parametrize("says", [True, False, None])
@pytest.mark.parametrize("values", [sentencepiece(), gemma4(), byte_level("llama-bpe"), byte_level("gpt-2")], ids=len)
def test_whether_a_plain_prompt_begins_with_bos(tmp_path: Path, values: Values, says: bool | None) -> None:
    values = values if says is None else {**values, "add_bos_token": says}
    path = tmp_path / "tiny.gguf"
    with both(path, values) as (tokenizer, oracle):
        found = tokenizer.encode("the fox", special=True, bos=read_card(path, "tiny").add_bos)
        assert found == oracle.ids("the fox", special=True, bos=True)


def test_control_tokens_by_id_equal_those_in_text() -> None:
    tokenizer = _tokenizer("llama")
    start, end = tokenizer.control_tokens["<s>"], tokenizer.control_tokens["<|end|>"]
    ids = tokenizer.encode_parts([start, "the fox</s>", end, "\n", end, "fox <s>"])
    assert [i for i in ids if i in tokenizer.special_ids] == [start, end, end]
    texts = ["the fox</s>", "\n", "fox <s>"]
    first, second, third = (tokenizer.encode(text, special=False) for text in texts)
    assert ids == [start, *first, end, *second, end, *third]  # each with its space before it


@settings(deadline=None)
@given(text=texts, sizes=st.lists(st.integers(1, 3), max_size=30))
@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_an_answer_in_pieces_is_the_text(kind: str, text: str, sizes: list[int]) -> None:
    """Byte tokens are held back until they are a character; the first space belongs to the answer."""
    assume(not any(added in text for added in ("<tool>", "   ")))  # behind these Llama puts a space
    tokenizer = _tokenizer(kind)
    ids = tokenizer.encode(text, special=False)
    detokenizer = Detokenizer(tokenizer)
    shown, at = "", 0
    for size in [*sizes, len(ids)]:
        shown += detokenizer.push(ids[at : at + size])
        assert "\ufffd" not in shown or "\ufffd" in text
        at += size
    space = " " if kind == "llama" and text else ""
    assert shown + detokenizer.flush() == space + text.replace("\u2581", " ")


@cache
def _tokenizer(kind: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return read(write_llama(Path(folder) / "tiny.gguf", SENTENCEPIECE[kind]))


def test_bytes_of_pieces(tmp_path: Path) -> None:
    tokenizer = _tokenizer("llama")
    values = sentencepiece()
    assert isinstance(values["tokens"], list)
    piece = dict(zip(values["tokens"], tokenizer.pieces, strict=True))
    assert (piece["<0x0A>"], piece["<0xE6>"], piece["\u2581the"], piece["   "]) == (b"\n", b"\xe6", b" the", b"   ")
    for control in ("<unk>", "<s>", "<|end|>"):
        assert Detokenizer(tokenizer).push([tokenizer.control_tokens[control]]) == ""
    assert tokenizer.at_least_tokens("\u2581" * 300) <= len(tokenizer.encode("\u2581" * 300, special=False))
    assert tokenizer.at_least_tokens("e" * 300) > 0


def test_spaces_of_a_user_s_token_may_be_written_as_pieces_write_them(tmp_path: Path) -> None:
    values = sentencepiece()
    assert isinstance(values["tokens"], list)
    old = {**values, "tokens": [*values["tokens"][:-1], "\u2581" * 3]}
    text = "a   b"
    assert read(write_llama(tmp_path / "old.gguf", old)).encode(text, special=True) == _tokenizer("llama").encode(
        text, special=True
    )


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        ({"<end_of_turn>": CONTROL, "</s>": CONTROL}, ["</s>", "<end_of_turn>"]),
        ({"<|im_end|>": USER_DEFINED, "</s>": CONTROL}, ["</s>", "<|im_end|>"]),
        ({"<|return|>": CONTROL, "<|call|>": CONTROL, "<|end|>": CONTROL}, ["<|call|>", "<|return|>"]),
        ({"<|end|>": CONTROL, "<|other|>": CONTROL}, ["<|end|>"]),
        ({"<eos>": CONTROL, "</s>": USER_DEFINED}, ["<eos>"]),
        ({"<|eot_id|>": NORMAL, "<eos>": CONTROL}, ["<eos>"]),
    ],
    ids=str,
)
def test_end_tokens_that_the_file_does_not_name(tmp_path: Path, tokens: dict[str, int], ends: list[str]) -> None:
    values = byte_level("gpt-2")
    plain, types = values["tokens"], values["token_type"]
    assert isinstance(plain, list)
    assert isinstance(types, list)
    del values["eos_token_id"]
    values |= {"tokens": ["<x>", *plain[1:], *tokens], "token_type": [*types, *tokens.values()]}
    card = read_card(write_llama(tmp_path / "tiny.gguf", values), "tiny")
    tokenizer = Tokenizer.from_json(card.tokenizer_json)
    assert sorted(tokenizer.token_text(token_id) for token_id in card.eos_token_ids) == ends
    assert tokenizer.special_ids.issuperset(card.eos_token_ids)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({**sentencepiece(), "model": "t5"}, "`t5`; supported"),
        ({**sentencepiece(), "scores": [0.0]}, "do not fit together"),
        ({**sentencepiece(), "scores": None}, "no scores"),
        ({**sentencepiece(), "unknown_token_id": 10**6}, "do not fit together"),
        ({**byte_level("gpt-2"), "merges": None}, "no merges"),
        (byte_level("unheard-of"), "`unheard-of`, is unknown"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unreadable_files_are_named(tmp_path: Path, values: Values, expected: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(write_llama(tmp_path / "tiny.gguf", values))
    assert expected in caught.value.message


def test_very_long_pieces_are_fast(tmp_path: Path) -> None:
    """Trying all ways to split the text would take minutes."""
    values = sentencepiece()
    plain, scores, types = ([*values[name]] for name in ("tokens", "scores", "token_type"))  # type: ignore[misc]  # lists
    long = {"tokens": [*plain, "a" * 1_000_000], "scores": [*scores, 0.0], "token_type": [*types, NORMAL]}
    assert read(write_llama(tmp_path / "tiny.gguf", values | long)).encode("a dog", special=False) == read(
        write_llama(tmp_path / "plain.gguf", values)
    ).encode("a dog", special=False)
