"""Reads a tokenizer's JSON: the exact bytes of every token, and which bytes of a text encoding can lose.

The decoder's steps are applied to single tokens. This is exact for the steps supported here, because only the stripping
of a first space depends on other tokens. Other steps are refused when the model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import tokenizers

from tailrace.errors import ModelError

__all__ = ["lost_bytes", "piece_bytes", "steps_of", "unknown_token"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_META = "\u2581"  # SentencePiece's character for a space

# A step is one object of the tokenizer's JSON; its fields depend on its type, hence Any.
Step = Mapping[str, Any]


def _byte_of_char() -> dict[str, int]:
    """Return the inverse of GPT-2's map of bytes to characters: printable bytes map to themselves, the others to U+0100
    and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
_NO_BYTE = "\uffff"
# Maps each byte-level character to the code point of its byte. Other characters below U+0100 stand for no byte.
_TO_BYTES = dict.fromkeys(range(256), _NO_BYTE) | {ord(char): chr(byte) for char, byte in _BYTE_OF_CHAR.items()}


def steps_of(component: Step | None, plural: str) -> list[Step]:
    """Return the steps of a decoder, normalizer or pre-tokenizer. `plural` is the name of the list in a Sequence."""
    if component is None:
        return []
    if component["type"] == "Sequence":
        return [step for part in component[plural] for step in steps_of(part, plural)]
    return [component]


def piece_bytes(token: str, decoder: list[Step], *, added: bool) -> bytes:
    """Return the bytes of a token that is not special.

    `added` tokens are matched in the original text, so a byte-level decoder does not apply to them. SentencePiece steps
    apply: their added tokens are also matched after normalisation, such as Gemma's runs of spaces.

    Raises: ModelError for an unsupported decoder.
    """
    for step in decoder:
        match step["type"]:
            case "ByteLevel":
                if added:
                    return token.encode()
                try:
                    return token.translate(_TO_BYTES).encode("latin-1")
                except UnicodeEncodeError:
                    return token.encode()
            case "ByteFallback":
                if found := _BYTE_TOKEN.fullmatch(token):
                    return bytes([int(found[1], 16)])
            case "Metaspace":
                token = token.replace(step["replacement"], " ")
            case "Replace" if "String" in step["pattern"]:
                token = token.replace(step["pattern"]["String"], step["content"])
            case "WordPiece":
                prefix = step["prefix"]
                token = token[len(prefix) :] if token.startswith(prefix) else f" {token}"
            case "Fuse" | "Strip":
                pass
            case unknown:
                raise ModelError(f"The tokenizer's decoder has an unsupported step: {unknown}.")
    return token.encode()


def lost_bytes(spec: Step, vocab: Mapping[str, int], added: list[tokenizers.AddedToken]) -> bytes | None:
    """Return the bytes that encoding may lose. All other bytes of a text are in the pieces of its tokens.

    A byte-level vocabulary loses bytes without a token (SmolLM has none for some control characters). SentencePiece
    loses two of the three bytes of U+2581.

    Returns None if any byte may be lost: because of a normalizer such as NFC, a pre-tokenizer that removes separators,
    an added token that removes white space around it, or characters without tokens.
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
    return _META.encode()[1:] if fallback else None  # of U+2581, which is decoded as a space


def unknown_token(spec: Step) -> str:
    """Return the token for unknown characters, "" if the model has none."""
    model = spec["model"]
    position = model.get("unk_id")  # Unigram has its position, other models its name
    return str(model.get("unk_token") or "") if position is None else str(model["vocab"][position][0])


def _keeps_bytes(normalizer: Step) -> bool:
    if normalizer["type"] == "Replace":
        return bool(normalizer["pattern"] == {"String": " "} and normalizer["content"] == _META)
    return normalizer["type"] in ("ByteLevel", "Prepend")
