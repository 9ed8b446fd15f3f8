"""Reads the vocabulary of a GGUF file: its tokens, their types, and the order of merges."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tailrace.errors import ModelError
from tailrace.models.gguf_header import Metadata

__all__ = ["CONTROL", "NORMAL", "UNKNOWN", "USER_DEFINED", "Vocabulary", "is_end", "parse_merges", "read_vocabulary"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

_META = "\u2581"  # SentencePiece's character for a space

# Much longer than any real piece. Finding all splits of a piece takes quadratic time.
_MAX_PIECE_LENGTH = 1000

# Tokens that always end a turn or a text, because many files name only one of both as `eos_token_id`. Same list as
# llama.cpp's, without the tokens that separate files and fill-in-the-middle parts.
_END_TOKENS = frozenset(
    (
        *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[e~["),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>"),
    )
)

# The first token does not end an answer if the vocabulary has all of the others: gpt-oss and Solar end a message within
# an answer with it, and in Gemma 4 it is an HTML tag.
_UNLESS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
)

# Some files mark end tokens as user defined. Only `</s>` may really be user defined: an HTML tag in Gemma.
_NOT_USER_DEFINED = _END_TOKENS - {"</s>"}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id, their GGUF types, and the merges (left, right) in order of rank."""

    tokens: list[str]
    types: list[int]
    merges: list[tuple[str, str]]
    unknown: str = ""  # the token for unknown text
    right_stripped: frozenset[str] = frozenset()  # tokens that remove the white space after them


def read_vocabulary(path: Path, metadata: Metadata) -> Vocabulary:
    """Read the vocabulary. Raises: ModelError if tokens, types, merges or scores are inconsistent."""
    words = metadata.get("tokenizer.ggml.tokens", list[str])
    if not words:
        raise ModelError(f"{path} has no vocabulary: it was converted without its tokenizer.")
    types = metadata.get("tokenizer.ggml.token_type", list[int]) or [NORMAL] * len(words)
    if len(types) != len(words):
        raise _misfit(path)
    model = metadata.get("tokenizer.ggml.model", str) or ""
    pieces = model != "gpt2"
    tokens = [_token(*found, pieces=pieces) for found in zip(range(len(words)), words, types, strict=True)]
    if len(set(tokens)) != len(tokens):
        raise _misfit(path)
    unknown_id = (metadata.get("tokenizer.ggml.unknown_token_id", int) or 0) if pieces else None
    if unknown_id is not None and not 0 <= unknown_id < len(tokens):
        raise _misfit(path)
    return Vocabulary(
        tokens,
        [_kind(*found) for found in zip(tokens, types, strict=True)],
        _merges(path, metadata, model, tokens, types),
        unknown="" if unknown_id is None else tokens[unknown_id],
        right_stripped=_right_stripped(metadata, tokens),
    )


def _token(token_id: int, word: str, kind: int, *, pieces: bool) -> str:
    if not word:
        return f"[EMPTY_{token_id}]"  # as llama.cpp names it
    # User-defined tokens are matched in the original text. Newer converters write their spaces as U+2581.
    return word.replace(_META, " ") if pieces and kind == USER_DEFINED else word


def _kind(token: str, kind: int) -> int:
    return CONTROL if kind == USER_DEFINED and token in _NOT_USER_DEFINED else kind


def _right_stripped(metadata: Metadata, tokens: list[str]) -> frozenset[str]:
    """Return the tokens that remove white space after them: only in Phi-3, whose GGUF files cannot express it."""
    name = (metadata.get("general.name", str) or "").lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    return frozenset(tokens) - {"<unk>", "<s>", "<|endoftext|>"}


def _merges(path: Path, metadata: Metadata, model: str, tokens: list[str], types: list[int]) -> list[tuple[str, str]]:
    if model == "bert":
        return []
    if model != "llama":
        lines = metadata.get("tokenizer.ggml.merges", list[str])
        if lines is None:
            raise ModelError(f"{path} has no merges: it was converted without its tokenizer.")
        return parse_merges(path, lines, tokens)
    scores = metadata.get("tokenizer.ggml.scores", list[float])
    if scores is None:
        raise ModelError(f"{path} has no scores: it was converted without its tokenizer.")
    if len(scores) != len(tokens):
        raise _misfit(path)
    normal = zip(tokens, scores, types, strict=True)
    return _merges_of_scores({token: score for token, score, kind in normal if kind == NORMAL})


def parse_merges(path: Path, lines: list[str], tokens: list[str]) -> list[tuple[str, str]]:
    """Parse merges. Raises: ModelError if a merge contains an unknown token."""
    known = set(tokens)
    # A space separates both parts. The left part may also begin with a space.
    pairs = [(line[:cut], line[cut + 1 :]) for line in lines if (cut := line.find(" ", 1)) > 0]
    if len(pairs) == len(lines) and all(a in known and b in known and a + b in known for a, b in pairs):
        return pairs
    raise ModelError(f"{path} is damaged: its merges name tokens that it does not have. Fetch the file again.")


def _merges_of_scores(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return all ways to make a piece of two others, in descending order of the piece's score.

    SentencePiece merges the neighbours that give the piece with the best score. For the same piece, the longest left
    part comes first, as in Hugging Face's conversions of such vocabularies.
    """
    merges = []
    for piece in sorted(scores, key=scores.__getitem__, reverse=True):
        if len(piece) > _MAX_PIECE_LENGTH:
            continue
        for cut in range(len(piece) - 1, 0, -1):
            left = piece[:cut]
            if left in scores and (right := piece[cut:]) in scores:
                merges.append((left, right))
    return merges


def is_end(token: str, control_tokens: Collection[str]) -> bool:
    """Return whether a control token ends an answer, given all control tokens of the model."""
    return token in _END_TOKENS and not any(token == but and others.issubset(control_tokens) for but, others in _UNLESS)


def _misfit(path: Path) -> ModelError:
    return ModelError(f"{path} is damaged: its tokens and their types do not fit together. Fetch the file again.")
