"""Builds a Hugging Face `tokenizers` file from the vocabulary inside a GGUF.

A GGUF names its pre-tokenizer (`tokenizer.ggml.pre`) and leaves the rules to whoever reads it. They are facts of the
original models, written here as their `tokenizer.json` files have them; the names and what they imply (whole words are
looked up before merging, whether a prompt begins with BOS) are llama.cpp's, whose converter wrote them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from tailrace.errors import ModelError
from tailrace.models._gguf import Metadata

__all__ = [
    "CONTROL",
    "GPT2",
    "NORMAL",
    "USER_DEFINED",
    "PreTokenizer",
    "Vocabulary",
    "pre_tokenizer",
    "read_vocabulary",
    "tokenizer_json",
]

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_level(*, use_regex: bool) -> dict[str, object]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split_by(regex: str) -> dict[str, object]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one family of models cuts text before merging."""

    rules: dict[str, object]
    normalizer: dict[str, object] | None = None
    ignore_merges: bool = False  # a whole word of the vocabulary is taken as it is
    add_bos: bool = False  # when the file does not say


GPT2 = PreTokenizer(_byte_level(use_regex=True))
_SMOLLM = PreTokenizer(
    {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    }
)
_LLAMA3 = PreTokenizer(_split_by(_SPLIT % r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer(_split_by(_SPLIT % r"\p{N}"), normalizer={"type": "NFC"})

_PRE_TOKENIZERS = {
    "default": GPT2,
    "gpt-2": GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "smollm": _SMOLLM,
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id, their GGUF types (1 normal, 3 control, 4 user defined), and the merges, "left right", by rank."""

    tokens: list[str]
    types: list[int]
    merges: list[str]


def pre_tokenizer(path: Path, metadata: Metadata) -> PreTokenizer:
    """Raises: ModelError for a tokenizer or a pre-tokenizer that is not among the known ones."""
    model = metadata.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelError(
            f"The tokenizer of {path} is `{model}`; only byte-level BPE (`gpt2`) is supported in GGUF files. "
            "An OpenVINO export of the model brings its own tokenizer and works."
        )
    name = metadata.text("tokenizer.ggml.pre") or "default"
    if found := _PRE_TOKENIZERS.get(name):
        return found
    raise ModelError(
        f"The pre-tokenizer of {path} is `{name}`; supported are {', '.join(_PRE_TOKENIZERS)}. "
        "An OpenVINO export of the model brings its own tokenizer and works."
    )


def read_vocabulary(path: Path, metadata: Metadata) -> Vocabulary:
    """Raises: ModelError when tokens, types and merges do not fit together."""
    tokens = metadata.texts("tokenizer.ggml.tokens")
    merges = metadata.texts("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise ModelError(f"{path} has no vocabulary or no merges: it was converted without its tokenizer.")
    types = metadata.numbers("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ModelError(f"{path} is damaged: its tokens and their types do not fit together. Fetch the file again.")
    return Vocabulary(tokens, types, merges)


def tokenizer_json(path: Path, vocabulary: Vocabulary, pre: PreTokenizer) -> str:
    """The text of a `tokenizer.json`. It adds no BOS by itself: `ModelCard.add_bos` says whether a prompt has one."""
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": pre.normalizer,
        "pre_tokenizer": pre.rules,
        "post_processor": _byte_level(use_regex=False) | {"trim_offsets": False},
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": ids,
            "merges": _merges(path, vocabulary.merges, ids),
        },
    }
    return msgspec.json.encode(content).decode()


def _added_tokens(vocabulary: Vocabulary) -> list[dict[str, object]]:
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]


def _merges(path: Path, merges: list[str], ids: dict[str, int]) -> list[list[str]]:
    pairs = [merge.split(" ") for merge in merges]
    if all(len(pair) == 2 and pair[0] in ids and pair[1] in ids and pair[0] + pair[1] in ids for pair in pairs):
        return pairs
    raise ModelError(f"{path} is damaged: its merges name tokens that it does not have. Fetch the file again.")
