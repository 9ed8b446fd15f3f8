"""Text to token ids and back, for one model.

Two instances of the `tokenizers` library are held rather than one that is switched over, because threads share this
object: one knows the special tokens by their spelling, the other takes that spelling as plain text. Their
`encode_batch_fast` is called even for a single text: it lets go of the interpreter lock, and `encode` does not
(measured with tokenizers 0.23.3 on a 2-core Xeon, 2026-11-21: a text of 500 KB held up every other thread for 0.36 s
with `encode` and for 0.01 s with the other).
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import tokenizers

from tailrace.errors import ModelError, RequestError
from tailrace.text._pieces import lost_bytes, piece_bytes, steps_of, strips_leading_space, unknown_token

__all__ = ["Tokenizer", "utf8_bytes"]


class Tokenizer:
    """Encodes text and knows the bytes of every token. Immutable once built, so that threads may share it.

    *Special* tokens are those that the JSON's `added_tokens` mark as special. Added tokens without that mark (`<think>`
    in some models) are ordinary vocabulary: their spelling becomes their id in any text, as in the library itself.
    """

    pieces: list[bytes]  # the true bytes of every token, by id; b"" for an id without a token
    texts: list[str | None]  # what a token shows on its own: "" if special, None if it is not whole UTF-8
    special_ids: frozenset[int]
    control_tokens: dict[str, int]  # spelling to id of every special token
    bos_ids: tuple[int, ...]  # what the post-processor puts before a text, often nothing
    vocab_size: int  # highest id plus one
    max_piece_bytes: int
    strip_leading_space: bool
    """Whether the model's own decoder drops the first space of a text decoded from its start, as SentencePiece models
    do. `Detokenizer` never does: an answer continues a prompt, and there the space is the model's own."""

    def __init__(self, tokenizer_json: str) -> None:
        try:
            spec = msgspec.json.decode(tokenizer_json)  # json takes a second more for 260,000 tokens
            self._special = tokenizers.Tokenizer.from_str(tokenizer_json)
            self._plain = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"The tokenizer cannot be read: {error}") from error
        for library in (self._special, self._plain):
            library.no_truncation()  # some published files ask for it; a prompt is never cut silently
            library.no_padding()
        self._plain.encode_special_tokens = True
        self._read_vocabulary(spec)
        self._name_control_tokens()
        self.bos_ids = self._find_bos()

    @classmethod
    def from_json(cls, tokenizer_json: str) -> Tokenizer:
        """Build from the contents of a Hugging Face `tokenizer.json`.

        Raises: ModelError for JSON that the library refuses, or a decoder whose tokens have no bytes of their own.
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
        # Plain text may give this one special token: it stands for characters that are not in the vocabulary.
        self._forbidden = self.special_ids - {vocab.get(unknown_token(spec), -1)}
        self.strip_leading_space = strips_leading_space(decoder)
        self._lost = lost_bytes(spec, vocab, list(added.values()))

    def _name_control_tokens(self) -> None:
        """Give every control token a second, secret name in the plain instance, so that `encode_parts` can write
        control tokens and plain text into one string. Nobody outside can know the names, so no text contains one."""
        added = self._special.get_added_tokens_decoder()
        secret = secrets.token_hex(8)
        # The library numbers new tokens from the size of the model's vocabulary; where that has holes, a new number
        # could be an old one. Unused names first, so that it cannot.
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

    def _find_bos(self) -> tuple[int, ...]:
        """What stands before the text when the post-processor is allowed to add something (it may add an end, too)."""
        bare = self._special.encode("a", add_special_tokens=False).ids
        full = self._special.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return tuple(full[:start])
        return ()

    def encode(self, text: str, *, special: bool, bos: bool = False) -> list[int]:
        """The ids of a text.

        `special` lets the spelling of a special token become that token; otherwise no special token comes out, however
        the text is written. `bos` puts the model's beginning-of-sequence token before a raw prompt, unless the model
        has none or the text already begins with it; a chat template brings its own.

        Raises: RequestError for text with lone surrogates.
        """
        ids = _ids(self._special, text) if special else self._disarm(_ids(self._plain, text))
        if bos and tuple(ids[: len(self.bos_ids)]) != self.bos_ids:
            return [*self.bos_ids, *ids]
        return ids

    def encode_parts(self, parts: Iterable[str | int]) -> list[int]:
        """The ids of a text in which control tokens are given by id and everything in strings is plain text.

        Equal to `encode(..., special=True)` of the same text with the control tokens spelled out, where the strings
        contain no such spelling: the text is encoded in one piece, since the first word of a text and whitespace
        beside a control token may be treated in their own way.

        Raises: RequestError for text with lone surrogates; KeyError for an id that is not in `control_tokens`.
        """
        text = "".join(part if isinstance(part, str) else self._secret_names[part] for part in parts)
        ids = self._disarm(_ids(self._plain, text))
        return [self._real_ids.get(i, i) for i in ids]

    def offsets(self, text: str, *, bos: bool = False) -> list[tuple[int, int, int]]:
        """As `encode(..., special=True)`: each id with the range of characters that it stands for.

        Raises: RequestError for text with lone surrogates.
        """
        utf8_bytes(text)
        encoding = self._special.encode_batch([text], add_special_tokens=False)[0]
        found = [(token_id, *places) for token_id, places in zip(encoding.ids, encoding.offsets, strict=True)]
        if bos and tuple(encoding.ids[: len(self.bos_ids)]) != self.bos_ids:
            return [*((token_id, 0, 0) for token_id in self.bos_ids), *found]
        return found

    def offsets_of_parts(self, parts: Sequence[str | int]) -> tuple[str, list[tuple[int, int, int]]]:
        """The text with its control tokens spelled out, and the ids of `encode_parts` with the range of characters that
        each stands for.

        Raises: as `encode_parts`.
        """
        written = [part if isinstance(part, str) else self._secret_names[part] for part in parts]
        shown = [part if isinstance(part, str) else self.pieces[part].decode() for part in parts]
        starts = list(accumulate(map(len, written), initial=0))
        shown_starts = list(accumulate(map(len, shown), initial=0))

        def place(position: int) -> int:
            which = bisect_right(starts, position, hi=len(parts)) - 1
            inside = position - starts[which]
            return shown_starts[which] + (inside if isinstance(parts[which], str) or not inside else len(shown[which]))

        text = "".join(written)
        utf8_bytes(text)
        encoding = self._plain.encode_batch([text], add_special_tokens=False)[0]
        found = [
            (self._real_ids.get(i, i), place(start), place(stop))
            for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
            for i in self._disarm([token_id])
        ]
        return "".join(shown), found

    def _disarm(self, ids: list[int]) -> list[int]:
        """Spell out special tokens that the model's own merges made of plain text.

        Where special tokens are part of the model's vocabulary, `<`, `s`, `>` may merge into `<s>` although the library
        was told to take `<s>` as text.
        """
        if self._forbidden.isdisjoint(ids):
            return ids
        disarmed: list[int] = []
        for i in ids:
            disarmed.extend(self._spelled_out(i) if i in self._forbidden else (i,))
        return disarmed

    def _spelled_out(self, token_id: int) -> list[int]:
        found: list[int] = []
        for char in self.pieces[token_id].decode():
            whole = self._id_of_piece.get(char.encode())
            alone = [whole] if whole is not None else [self._id_of_piece.get(bytes([b])) for b in char.encode()]
            found.extend(i for i in alone if i is not None)
        return found

    def comparable(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The ids in a form that is the same whenever a sequence says the same."""
        return tuple(token_ids)

    def token_text(self, token_id: int) -> str:
        """One token for people to look at, special ones too; broken UTF-8 as U+FFFD, "" for an id out of range."""
        if 0 <= token_id < self.vocab_size:
            return self.pieces[token_id].decode("utf-8", "replace")
        return ""

    def at_least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens, much cheaper than encoding: bytes over the longest piece, rounded up.

        0 where the tokenizer could lose bytes (see `lost_bytes`): then nothing can be said without encoding.

        Raises: RequestError for text with lone surrogates.
        """
        if self._lost is None:
            return 0
        num_bytes = len(utf8_bytes(text).translate(None, self._lost))
        return -(-num_bytes // self.max_piece_bytes)


def utf8_bytes(text: str) -> bytes:
    """Raises: RequestError for text with lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise RequestError("The text is not valid Unicode: it has a lone surrogate.") from None


def _ids(library: tokenizers.Tokenizer, text: str) -> list[int]:
    if not text.isascii():
        utf8_bytes(text)  # the library would raise a TypeError that names no reason
    encodings: Sequence[tokenizers.Encoding] = library.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encodings[0].ids
    return ids


def _whole(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
