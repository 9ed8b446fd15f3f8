"""Encodes and decodes text for one model.

Has two instances of the `tokenizers` library, because threads share this object and the mode of an instance cannot be
switched: one parses special tokens in text, the other treats them as plain text. Uses `encode_batch_fast` even for a
single text, because it releases the GIL, and `encode` does not (measured with tokenizers 0.23.3 on a 2-core Xeon,
2026-11-21: with a text of 500 KB, `encode` blocked all other threads for 0.36 s, `encode_batch_fast` for 0.01 s).
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import msgspec
import tokenizers

from tailrace.errors import ModelError, RequestError, UnsupportedParameter
from tailrace.text._pieces import lost_bytes, piece_bytes, steps_of, unknown_token
from tailrace.text.infill import find_infill_tokens, infill_ids
from tailrace.types import Infill, Segment, ids_of, num_tokens_of

__all__ = ["Tokenizer", "utf8_bytes"]


class Tokenizer:
    """Encodes text, and has the bytes of every token. Immutable, so threads may share it.

    *Special* tokens are those that the JSON's `added_tokens` mark as special. Other added tokens (`<think>` in some
    models) are ordinary vocabulary: their text becomes their id in any text, as in the library itself.
    """

    pieces: list[bytes]  # the exact bytes of every token, by id; b"" for an unused id
    texts: list[str | None]  # the text of a single token: "" if special, None if not whole characters
    special_ids: frozenset[int]
    control_tokens: dict[str, int]  # id of every special token, by its text
    bos_ids: tuple[int, ...]  # tokens that the post-processor puts before a text, often none
    ends: tuple[int, ...]  # tokens that it puts behind a text, often none
    between: tuple[int, ...]  # of a pair of texts; `bos_ids` come before the first one, and `ends` behind the second
    vocab_size: int  # highest id plus one
    max_piece_bytes: int
    can_infill: bool
    infill_ends: tuple[int, ...]  # tokens that end the answer to an infill

    def __init__(self, tokenizer_json: str) -> None:
        try:
            spec = msgspec.json.decode(tokenizer_json)  # the json module takes one second longer for 260,000 tokens
            self._special = tokenizers.Tokenizer.from_str(tokenizer_json)
            self._plain = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"The tokenizer cannot be read: {error}") from error
        for library in (self._special, self._plain):
            library.no_truncation()  # some published files enable it; a prompt must not be truncated silently
            library.no_padding()
        self._plain.encode_special_tokens = True
        self._read_vocabulary(spec)
        self._name_control_tokens()
        self.bos_ids, self.ends = self._find_frame()
        self.between = self._find_between()
        self._infill = find_infill_tokens(self._special.token_to_id)
        self.can_infill, self.infill_ends = self._infill is not None, self._infill.ends if self._infill else ()

    @classmethod
    def from_json(cls, tokenizer_json: str) -> Tokenizer:
        """Make a tokenizer from the text of a Hugging Face `tokenizer.json`.

        Raises: ModelError if the library rejects the JSON, or if the decoder is not supported.
        """
        return cls(tokenizer_json)

    def _read_vocabulary(self, spec: dict[str, Any]) -> None:
        vocab = self._special.get_vocab(with_added_tokens=True)
        added = self._special.get_added_tokens_decoder()
        decoder = steps_of(spec.get("decoder"), "decoders")
        if not decoder:
            raise ModelError("The tokenizer has no decoder, so the bytes of its tokens are not known.")
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.control_tokens = {added[i].content: i for i in sorted(self.special_ids) if added[i].content}
        self.pieces = [b""] * self.vocab_size
        for token, i in vocab.items():
            special = i in self.special_ids
            self.pieces[i] = token.encode() if special else piece_bytes(token, decoder, added=i in added)
        self.texts = [_whole(piece) for piece in self.pieces]
        for i in self.special_ids:
            self.texts[i] = ""
        self.max_piece_bytes = max(map(len, self.pieces), default=0) or 1
        # Plain text may only give the special token for unknown characters.
        self._forbidden = self.special_ids - {vocab.get(unknown_token(spec), -1)}
        self._lost = lost_bytes(spec, vocab, list(added.values()))

    def _name_control_tokens(self) -> None:
        """Add a second, secret name for every control token to the plain instance, so that `encode_parts` can encode
        control tokens and plain text in one string. The names are random, so no text contains one."""
        added = self._special.get_added_tokens_decoder()
        secret = secrets.token_hex(8)
        # The library numbers new tokens from the size of the model's vocabulary. If the vocabulary has gaps, these
        # numbers could already be in use. Adding unused names first prevents this.
        gap = max(0, self.vocab_size - self._plain.get_vocab_size(with_added_tokens=False))
        names = [f"\ufdd0{secret}-{i}\ufdd1" for i in range(gap)]
        self._secret_names = {i: f"\ufdd0{secret}{i}\ufdd1" for i in self.control_tokens.values()}
        self._plain.add_tokens(
            [tokenizers.AddedToken(name, normalized=False) for name in names]
            + [
                tokenizers.AddedToken(name, lstrip=added[i].lstrip, rstrip=added[i].rstrip, normalized=False)
                for i, name in self._secret_names.items()
            ]
        )
        self._real_ids = {self._plain.token_to_id(name): i for i, name in self._secret_names.items()}
        self._id_of_piece = {
            piece: i for i, piece in enumerate(self.pieces) if 0 < len(piece) <= 4 and i not in self.special_ids
        }

    @cached_property
    def all_texts(self) -> list[str | None]:
        """As `texts`, with the text of special tokens."""
        texts = list(self.texts)
        for i in self.special_ids:
            texts[i] = self.pieces[i].decode()
        return texts

    def _find_frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens that the post-processor adds before a text, and behind it."""
        bare = self._special.encode("a", add_special_tokens=False).ids
        full = self._special.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return tuple(full[:start]), tuple(full[start + len(bare) :])
        return (), ()

    def _find_between(self) -> tuple[int, ...]:
        """Return the tokens that the post-processor adds between the texts of a pair."""
        bare = self._special.encode("a", add_special_tokens=False).ids
        full = self._special.encode("a", "a", add_special_tokens=True).ids
        start = len(self.bos_ids) + len(bare)
        return tuple(full[start : len(full) - len(bare) - len(self.ends)])

    def segments(self, text: str, *, bos: bool) -> tuple[Segment, ...]:
        """Return a text as a prompt. `bos` and errors as for `encode`."""
        return (tuple(self.encode(text, special=True, bos=bos)),)

    def last_tokens(self, segments: tuple[Segment, ...], num_tokens: int) -> tuple[Segment, ...]:
        """Return the end of a prompt, with at most so many tokens.

        Raises: UnsupportedParameter if it is too long and has other segments than text or token ids.
        """
        if num_tokens_of(segments) <= num_tokens:
            return segments
        if not all(isinstance(one, tuple) for one in segments):
            raise UnsupportedParameter("Only a prompt of text or token ids can be truncated.", param="truncate")
        return (ids_of(segments)[-num_tokens:],)

    def infill(self, asked: Infill, *, bos: bool, room: int | None = None) -> tuple[Segment, ...]:
        """Return an infill as a prompt, with at most `room` tokens. Its texts never become special tokens.

        Only if `can_infill`. Raises: RequestError for text with lone surrogates.
        """
        assert self._infill is not None
        start = self.bos_ids if bos else ()
        encoded = infill_ids(
            asked,
            self._infill,
            lambda text: self.encode(text, special=False),
            room=None if room is None else room - len(start),
        )
        return ((*start, *encoded),)

    def encode(self, text: str, *, special: bool, bos: bool = False) -> list[int]:
        """Encode a text.

        With `special`, the text of a special token becomes that token; otherwise the result never has special tokens.
        `bos` adds the model's beginning-of-sequence token, unless the model has none or the text begins with it. Chat
        templates add their own.

        Raises: RequestError for text with lone surrogates.
        """
        ids = _ids(self._special, text) if special else self._remove_special(_ids(self._plain, text))
        if bos and tuple(ids[: len(self.bos_ids)]) != self.bos_ids:
            return [*self.bos_ids, *ids]
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode(..., special=True)` of each text. The library uses all processors.

        Raises: RequestError for text with lone surrogates.
        """
        for text in texts:
            utf8_bytes(text)
        encodings: Sequence[tokenizers.Encoding] = self._special.encode_batch_fast(
            list(texts), add_special_tokens=False
        )
        return [encoding.ids for encoding in encodings]

    def encode_parts(self, parts: Iterable[str | int]) -> list[int]:
        """Encode a text whose control tokens are given as ids. All strings are plain text.

        Equal to `encode(..., special=True)` of the whole text, if the strings contain no control tokens. The text is
        encoded as a whole, because a tokenizer may treat the first word, and white space next to a control token,
        differently.

        Raises: RequestError for text with lone surrogates; KeyError for an id that is not in `control_tokens`.
        """
        text = "".join(part if isinstance(part, str) else self._secret_names[part] for part in parts)
        ids = self._remove_special(_ids(self._plain, text))
        return [self._real_ids.get(i, i) for i in ids]

    def offsets(self, text: str, *, bos: bool = False) -> list[tuple[int, int, int]]:
        """Like `encode(..., special=True)`, with the range of characters of each id.

        Raises: RequestError for text with lone surrogates.
        """
        utf8_bytes(text)
        encoding = self._special.encode_batch([text], add_special_tokens=False)[0]
        found = [(token_id, *offsets) for token_id, offsets in zip(encoding.ids, encoding.offsets, strict=True)]
        if bos and tuple(encoding.ids[: len(self.bos_ids)]) != self.bos_ids:
            return [*((token_id, 0, 0) for token_id in self.bos_ids), *found]
        return found

    def offsets_of_parts(self, parts: Sequence[str | int]) -> tuple[str, list[tuple[int, int, int]]]:
        """Return the text including its control tokens, and the ids of `encode_parts`, each with its range of
        characters.

        Raises: as `encode_parts`.
        """
        written = [part if isinstance(part, str) else self._secret_names[part] for part in parts]
        shown = [part if isinstance(part, str) else self.pieces[part].decode() for part in parts]
        starts = list(accumulate(map(len, written), initial=0))
        shown_starts = list(accumulate(map(len, shown), initial=0))

        def shown_at(position: int) -> int:
            which = bisect_right(starts, position, hi=len(parts)) - 1
            inside = position - starts[which]
            return shown_starts[which] + (inside if isinstance(parts[which], str) or not inside else len(shown[which]))

        text = "".join(written)
        utf8_bytes(text)
        encoding = self._plain.encode_batch([text], add_special_tokens=False)[0]
        found = [
            (self._real_ids.get(i, i), shown_at(start), shown_at(stop))
            for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
            for i in self._remove_special([token_id])
        ]
        return "".join(shown), found

    def _remove_special(self, ids: list[int]) -> list[int]:
        """Replace special tokens in encoded plain text with the tokens of their characters.

        If special tokens are part of the model's vocabulary, `<`, `s`, `>` may merge into `<s>`, even though the
        library treats `<s>` as plain text.
        """
        if self._forbidden.isdisjoint(ids):
            return ids
        disarmed: list[int] = []
        for i in ids:
            disarmed.extend(self._character_ids(i) if i in self._forbidden else (i,))
        return disarmed

    def _character_ids(self, token_id: int) -> list[int]:
        found: list[int] = []
        for char in self.pieces[token_id].decode():
            whole = self._id_of_piece.get(char.encode())
            alone = [whole] if whole is not None else [self._id_of_piece.get(bytes([b])) for b in char.encode()]
            found.extend(i for i in alone if i is not None)
        return found

    def comparable(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return a form of the ids that is equal for equal texts of two runs."""
        return tuple(token_ids)

    def token_text(self, token_id: int) -> str:
        """Return a token's text for display, also of special tokens. Invalid UTF-8 becomes U+FFFD; "" for invalid
        ids."""
        if 0 <= token_id < self.vocab_size:
            return self.pieces[token_id].decode("utf-8", "replace")
        return ""

    def at_least_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens, without encoding: bytes divided by the longest piece, rounded
        up.

        Returns 0 if the tokenizer may lose any byte (see `lost_bytes`).

        Raises: RequestError for text with lone surrogates.
        """
        if self._lost is None:
            return 0
        num_bytes = len(utf8_bytes(text).translate(None, self._lost))
        return -(-num_bytes // self.max_piece_bytes)


def utf8_bytes(text: str) -> bytes:
    """Encode as UTF-8. Raises: RequestError for text with lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise RequestError("The text is not valid Unicode: it has a lone surrogate.") from None


def _ids(library: tokenizers.Tokenizer, text: str) -> list[int]:
    if not text.isascii():
        utf8_bytes(text)  # the library would raise a TypeError without a reason
    encodings: Sequence[tokenizers.Encoding] = library.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encodings[0].ids
    return ids


def _whole(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
