"""Token ids to text, for one sequence, without ever showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tailrace.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns the tokens of one sequence into text as they come.

    Bytes that may yet become a character are held back; bytes that cannot any more give U+FFFD as soon as that is
    certain. Special tokens and ids outside the vocabulary give nothing and leave held bytes alone.
    """

    __slots__ = ("_decoder", "_pending", "_pieces", "_size", "_texts")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._texts = tokenizer.texts
        self._pieces = tokenizer.pieces
        self._size = tokenizer.vocab_size
        self._decoder = _Utf8Decoder("replace")
        self._pending = False

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        # Nearly every call is one token with nothing held back: one look-up.
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
        """End the sequence: U+FFFD for an unfinished character, else "". The next push starts afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._pending = False
        return rest
