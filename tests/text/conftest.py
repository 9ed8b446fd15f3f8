"""Two small tokenizers, one of each family, with tokens that split, join and contain characters."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from tailrace.text import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _byte_level_chars() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]


@pytest.fixture(scope="session")
def byte_level_json() -> str:
    merges = [("h", "i"), ("Ġ", "hi"), ("u", "s"), ("us", "er"), ("e", "r"), ("Ã", "©"), ("æ", "Ĺ"), ("ð", "Ł")]
    words = [*SPECIAL, *_byte_level_chars(), *(left + right for left, right in merges)]
    library = tokenizers.Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(dict.fromkeys(words))}, merges=merges)
    )
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    library.add_tokens([tokenizers.AddedToken("<think>", normalized=False), tokenizers.AddedToken("é!")])
    return str(library.to_str())


@pytest.fixture(scope="session")
def sentencepiece_json() -> str:
    """Return a tokenizer as converted from SentencePiece: `</s>` is in the vocabulary and its characters merge into it,
    and the first word of a text gets a space."""
    merges = [("\u2581", "h"), ("\u2581h", "i"), ("<", "/"), ("</", "s"), ("</s", ">")]
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"\u2581his</>[INST]:é",
        *(left + right for left, right in merges),
    ]
    library = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(dict.fromkeys(words))},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
        + [tokenizers.AddedToken("[INST]", special=True, normalized=False, rstrip=True)]
    )
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", library.token_to_id("<s>")), ("</s>", library.token_to_id("</s>"))],
    )
    return str(library.to_str())


@pytest.fixture(scope="session")
def byte_level(byte_level_json: str) -> Tokenizer:
    return Tokenizer.from_json(byte_level_json)


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_json: str) -> Tokenizer:
    return Tokenizer.from_json(sentencepiece_json)


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece"])
def both(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer = request.getfixturevalue(request.param)
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer


@pytest.fixture(scope="session")
def byte_level_library(byte_level_json: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(byte_level_json)


@pytest.fixture(scope="session")
def sentencepiece_library(sentencepiece_json: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(sentencepiece_json)
