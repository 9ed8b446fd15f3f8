"""What a tokenizer's JSON says about its vocabulary: the true bytes of every token, and what it can lose of a text.

A decoder is read step by step and applied to single tokens. That is exact for the steps known here, because none of
them but the stripping of a first space looks at a neighbour; any other step is refused when the model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import tokenizers

from tailrace.errors import ModelError

__all__ = ["lost_bytes", "piece_bytes", "steps_of", "strips_leading_space", "unknown_token"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_META = "\u2581"  # SentencePiece writes a space so

# A step is one object of the tokenizer's JSON; its fields depend on its type, hence Any.
Step = Mapping[str, Any]


def _byte_of_char() -> dict[str, int]:
    """GPT-2's map of bytes to printable characters, turned round: printable bytes stand for themselves, the others
    follow from U+0100 in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def steps_of(component: Step | None, plural: str) -> list[Step]:
    """The steps of a decoder, normalizer or pre-tokenizer in order; `plural` names the list inside a Sequence."""
    if component is None:
        return []
    if component["type"] == "Sequence":
        return [step for part in component[plural] for step in steps_of(part, plural)]
    return [component]


def piece_bytes(token: str, decoder: list[Step], *, added: bool) -> bytes:
    """The bytes that a token that is not special stands for.

    `added` tokens are matched in the text as they are written, so a byte-level decoder does not apply to them. The
    SentencePiece steps do: their added tokens are also reached through the normalizer, as Gemma's runs of spaces are.

    Raises: ModelError for a decoder that is not understood.
    """
    for step in decoder:
        match step["type"]:
            case "ByteLevel":
                if added or not all(char in _BYTE_OF_CHAR for char in token):
                    return token.encode()
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            case "ByteFallback":
                if found := _BYTE_TOKEN.fullmatch(token):
                    return bytes([int(found[1], 16)])
            case "Metaspace":
                token = token.replace(step["replacement"], " ")
            case "Replace" if "String" in step["pattern"]:
                token = token.replace(step["pattern"]["String"], step["content"])
            case "Fuse" | "Strip":
                pass
            case unknown:
                raise ModelError(f"The tokenizer's decoder has a step that tailrace does not know: {unknown}.")
    return token.encode()


def strips_leading_space(decoder: list[Step]) -> bool:
    """Whether decoding from the start drops one space that encoding had put there."""
    return any(
        (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in decoder
    )


def lost_bytes(spec: Step, vocab: Mapping[str, int], added: list[tokenizers.AddedToken]) -> bytes | None:
    """The bytes that may vanish when a text is encoded; all others are sure to be found in the pieces of its tokens.

    A byte-level vocabulary loses the bytes that it has no token for (SmolLM's has none for some control characters),
    SentencePiece two of the three bytes of a U+2581.
    None if nothing is sure, because one part could drop or shorten text: a normalizer such as NFC, a pre-tokenizer that
    removes separators, an added token that swallows the whitespace around it, characters without tokens.
    """
    normalizer = steps_of(spec.get("normalizer"), "normalizers")
    pre_tokenizer = steps_of(spec.get("pre_tokenizer"), "pretokenizers")
    model = spec["model"]
    kept = (
        model.get("type") in ("BPE", "Unigram")
        and not any(token.lstrip or token.rstrip for token in added)
        and all(_keeps_bytes(step) for step in normalizer)
        and all(
            step["type"] in ("ByteLevel", "Digits", "Metaspace")
            or (step["type"] in ("Split", "Punctuation") and step["behavior"] != "Removed")
            for step in pre_tokenizer
        )
    )
    if not kept:
        return None
    if any(step["type"] == "ByteLevel" for step in (*normalizer, *pre_tokenizer)):
        return bytes(byte for char, byte in _BYTE_OF_CHAR.items() if char not in vocab)
    fallback = bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    return _META.encode()[1:] if fallback else None  # of a U+2581, which comes back as a space


def unknown_token(spec: Step) -> str:
    """The token for what is not in the vocabulary, "" if the model has none."""
    model = spec["model"]
    position = model.get("unk_id")  # Unigram gives its place, the others its name
    return str(model.get("unk_token") or "") if position is None else str(model["vocab"][position][0])


def _keeps_bytes(normalizer: Step) -> bool:
    if normalizer["type"] == "Replace":
        return bool(normalizer["pattern"] == {"String": " "} and normalizer["content"] == _META)
    return normalizer["type"] in ("ByteLevel", "Prepend")
