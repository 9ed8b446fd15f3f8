"""Builds a Hugging Face `tokenizers` file from the vocabulary in a GGUF file.

There are three families. Byte-level BPE splits text into words with each model's rules (`pre_tokenizers`), represents
each byte as a character, and merges within words. SentencePiece represents a space as U+2581, merges across the whole
text, and encodes unknown characters as bytes. WordPiece, of encoders, takes the longest piece from the left; in GGUF
files, pieces that begin a word have U+2581 before them, and the others nothing.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tailrace.errors import ModelError
from tailrace.models._vocabulary import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary
from tailrace.models.gguf_header import Metadata
from tailrace.models.pre_tokenizers import PRE_TOKENIZERS, Scheme, Step

__all__ = ["WORDPIECE", "read_scheme", "tokenizer_json"]

_META = "\u2581"
_CONTINUING = "##"  # before pieces that continue a word, in tokenizer.json
_OWN = "Use the model's Hugging Face directory or an OpenVINO export: they contain their own tokenizer."


def _sentencepiece(*, space_prefix: bool, always_bos: bool = False) -> Scheme:
    """`space_prefix`: a space is added at the start of a text and after each added token.

    Newer Hugging Face files add it only at the start of the text; older files and llama.cpp also add it after tokens. A
    GGUF file does not say which. After BOS, where it matters most, models were trained with it.
    """
    replace: Step = {"type": "Replace", "pattern": {"String": " "}, "content": _META}
    restore: Step = {"type": "Replace", "pattern": {"String": _META}, "content": " "}
    return Scheme(
        {"type": "Sequence", "normalizers": [*([{"type": "Prepend", "prepend": _META}] * space_prefix), replace]},
        None,
        {
            "type": "Sequence",
            "decoders": [
                restore,
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * space_prefix),
            ],
        },
        byte_fallback=True,
        add_bos=True,
        always_bos=always_bos,
    )


def _wordpiece() -> Scheme:
    return Scheme(
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None},
        {"type": "BertPreTokenizer"},
        {"type": "WordPiece", "prefix": _CONTINUING, "cleanup": True},
        add_bos=True,
    )


WORDPIECE = _wordpiece()


def read_scheme(path: Path, metadata: Metadata) -> Scheme:
    """Return the tokenizer's scheme. Raises: ModelError for an unknown tokenizer or pre-tokenizer."""
    match metadata.get("tokenizer.ggml.model", str):
        case "gpt2":
            name = metadata.get("tokenizer.ggml.pre", str) or "default"
            if name in PRE_TOKENIZERS:
                return PRE_TOKENIZERS[name]
            raise ModelError(f"The pre-tokenizer of {path}, `{name}`, is unknown. {_OWN}")
        case "llama":
            return _sentencepiece(space_prefix=metadata.get("tokenizer.ggml.add_space_prefix", bool) is not False)
        case "bert":
            return WORDPIECE
        case "gemma4":
            return _sentencepiece(space_prefix=False, always_bos=True)
        case model:
            raise ModelError(
                f"The tokenizer of {path} is `{model}`; supported in GGUF files are byte-level BPE (`gpt2`), "
                f"SentencePiece (`llama`, `gemma4`) and WordPiece (`bert`). {_OWN}"
            )


def tokenizer_json(vocabulary: Vocabulary, scheme: Scheme, bos: str = "", eos: str = "") -> str:
    """Return the text of a `tokenizer.json`. With special tokens, it puts `bos` before a text, and `eos` behind it."""
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    content: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": scheme.normalizer,
        "pre_tokenizer": scheme.pre_tokenizer,
        "post_processor": _template(bos, eos, ids) if bos or eos else None,
        "decoder": scheme.decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": vocabulary.unknown or None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": scheme.byte_fallback,
            "byte_fallback": scheme.byte_fallback,
            "ignore_merges": scheme.ignore_merges,
            "vocab": ids,
            "merges": vocabulary.merges,
        },
    }
    if scheme is WORDPIECE:
        content |= _word_pieces(vocabulary)
    return msgspec.json.encode(content).decode()


def _word_pieces(vocabulary: Vocabulary) -> dict[str, object]:
    """Return the parts of a `tokenizer.json` that differ for WordPiece. A vocabulary without capital letters is one of
    a model that does not distinguish them."""
    pieces = [
        _word_piece(token) if kind == NORMAL else token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    normal = (piece for piece, kind in zip(pieces, vocabulary.types, strict=True) if kind == NORMAL)
    is_cased = any(piece != piece.lower() for piece in normal if not piece.startswith("["))
    return {
        "normalizer": {**(WORDPIECE.normalizer or {}), "lowercase": not is_cased},
        "model": {
            "type": "WordPiece",
            "unk_token": vocabulary.unknown,
            "continuing_subword_prefix": _CONTINUING,
            "max_input_chars_per_word": 100,
            "vocab": {piece: token_id for token_id, piece in enumerate(pieces)},
        },
    }


def _word_piece(token: str) -> str:
    if token.startswith(_META) and len(token) > 1:
        return token[1:]
    return token if token.startswith("[") and token.endswith("]") else f"{_CONTINUING}{token}"


def _template(bos: str, eos: str, ids: dict[str, int]) -> Step:
    """Return the frame of a text. The second text of a pair has only `eos` behind it if the model has one, as in
    BERT."""

    def special(token: str, number: int) -> list[object]:
        return [{"SpecialToken": {"id": token, "type_id": number}}] if token else []

    def text(name: str, number: int) -> list[object]:
        return [{"Sequence": {"id": name, "type_id": number}}]

    single = [*special(bos, 0), *text("A", 0), *special(eos, 0)]
    second = [*text("B", 1), *special(eos, 1)] if eos else [*special(bos, 0), *text("B", 0)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *second],
        "special_tokens": {
            token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in (bos, eos) if token
        },
    }


def _added_tokens(vocabulary: Vocabulary) -> list[Step]:
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": token in vocabulary.right_stripped,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
