"""Decodes the token ids of one sequence incrementally, without splitting characters."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tailrace.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes the tokens of one sequence incrementally.

    Bytes of an incomplete character are held back. Invalid bytes become U+FFFD as soon as they are known to be invalid.
    Special tokens and ids outside the vocabulary give no text and do not affect held bytes. With `include_special`,
    special tokens give their text.
    """

    __slots__ = ("_decoder", "_pending", "_pieces", "_size", "_texts")

    def __init__(self, tokenizer: Tokenizer, *, include_special: bool = False) -> None:
        self._texts = tokenizer.all_texts if include_special else tokenizer.texts
        self._pieces = tokenizer.pieces
        self._size = tokenizer.vocab_size
        self._decoder = _Utf8Decoder("replace")
        self._pending = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        # Fast path: nearly every call has one token and no held bytes.
        if len(token_ids) == 1 and not self._pending and 0 <= (token_id := token_ids[0]) < self._size:
            text = self._texts[token_id]
            if text is not None:
                return text
        return self._push_any(token_ids)

    def _push_any(self, token_ids: Sequence[int]) -> str:
        shown: list[str] = []
        for token_id in token_ids:
            if not 0 <= token_id < self._size:
                continue
            text = self._texts[token_id]
            if text == "":
                continue
            if text is None or self._pending:
                text = self._decoder.decode(self._pieces[token_id])
                self._pending = self._decoder.getstate()[0] != b""
            shown.append(text)
        return "".join(shown)

    def flush(self) -> str:
        """End the sequence. Returns U+FFFD for an incomplete character, else "". Resets the decoder."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._pending = False
        return rest
