"""Builds a Hugging Face `tokenizers` file from the vocabulary in a GGUF file.

There are two families. Byte-level BPE splits text into words with each model's rules (`pre_tokenizers`), represents
each byte as a character, and merges within words. SentencePiece represents a space as U+2581, merges across the whole
text, and encodes unknown characters as bytes.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tailrace.errors import ModelError
from tailrace.models._vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary
from tailrace.models.gguf_header import Metadata
from tailrace.models.pre_tokenizers import PRE_TOKENIZERS, Scheme, Step

__all__ = ["read_scheme", "tokenizer_json"]

_META = "\u2581"
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
        case "gemma4":
            return _sentencepiece(space_prefix=False, always_bos=True)
        case model:
            raise ModelError(
                f"The tokenizer of {path} is `{model}`; supported in GGUF files are byte-level BPE (`gpt2`) and "
                f"SentencePiece (`llama`, `gemma4`). {_OWN}"
            )


def tokenizer_json(vocabulary: Vocabulary, scheme: Scheme, bos: str = "") -> str:
    """Return the text of a `tokenizer.json`. With special tokens, it puts `bos` before a text."""
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": scheme.normalizer,
        "pre_tokenizer": scheme.pre_tokenizer,
        "post_processor": _template(bos, ids[bos]) if bos else None,
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
    return msgspec.json.encode(content).decode()


def _template(bos: str, token_id: int) -> Step:
    def part(first: str) -> list[object]:
        return [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": first, "type_id": 0}}]

    return {
        "type": "TemplateProcessing",
        "single": part("A"),
        "pair": [*part("A"), *part("B")],
        "special_tokens": {bos: {"id": bos, "ids": [token_id], "tokens": [bos]}},
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
