"""Recovers the token ids that llama.cpp's stream omits.

While the text ends in the middle of a UTF-8 character, llama.cpp sends nothing. Then it sends the whole text with only
the last token's id. The other ids follow from the text, the number of tokens, and the fact that each boundary between
them is inside of a character.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["TokenBytes", "is_open"]

_MAX_TRIES = 50_000  # limit for text that is not UTF-8: 50 ms; most texts need a few hundred tries


class TokenBytes:
    """The bytes that each token of a vocabulary stands for."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._longest = max(map(len, pieces), default=0)
        self._ids: dict[bytes, int] = {}
        for token_id, piece in enumerate(pieces):
            if piece:
                self._ids.setdefault(piece, token_id)
        # Possible tokens before the last one: tokens that end inside of a character, and tokens that fit into one.
        self._openers = [token_id for piece, token_id in self._ids.items() if is_open(piece)]
        self._fillers = [
            [token_id for piece, token_id in self._ids.items() if len(piece) < room and not is_open(piece)]
            for room in range(4)
        ]

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def recover(self, text: str, count: int, last_id: int) -> tuple[int, ...]:
        """Return the `count` tokens of `text`, whose last id is known."""
        end = self._pieces[last_id]
        whole = text.encode()
        if whole.endswith(end):
            for ids in self._splits(whole, 0, len(whole) - len(end), count - 1):
                return (*ids, last_id)
        return self._guess(text, count, last_id) or (*self._openers[:1] * (count - 1), last_id)

    def _splits(self, whole: bytes, begin: int, end: int, count: int) -> Iterator[tuple[int, ...]]:
        """Yield the ways to split whole[begin:end] into `count` tokens, long tokens first."""
        if count == 0:
            if begin == end:
                yield ()
            return
        for cut in range(min(end, begin + self._longest), begin, -1):
            token_id = self._ids.get(whole[begin:cut])
            if token_id is not None and is_open(whole[:cut]):
                for rest in self._splits(whole, cut, end, count - 1):
                    yield (token_id, *rest)

    def _guess(self, text: str, count: int, last_id: int) -> tuple[int, ...] | None:
        """Find tokens that decode to the same text, if the exact bytes are unknown because they are not UTF-8."""
        tries = 0

        def search(begun: bytes, ids: tuple[int, ...]) -> tuple[int, ...] | None:
            nonlocal tries
            if len(ids) == count - 1:
                return (*ids, last_id) if _shown(begun + self._pieces[last_id]) == text else None
            for token_id in (*self._openers, *self._fillers[_room(begun)]):
                tries += 1
                if tries > _MAX_TRIES:
                    return None
                longer = begun + self._pieces[token_id]
                if is_open(longer) and text.startswith(_shown(_closed(longer))):
                    found = search(longer, (*ids, token_id))
                    if found is not None:
                        return found
            return None

        return search(b"", ())


def is_open(text: bytes) -> bool:
    """Return whether llama.cpp treats the text as ending in the middle of a character."""
    return _room(text) > 0


def _room(text: bytes) -> int:
    """Return how many bytes the incomplete character at the end still needs, or 0."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        length = 2 if byte >> 5 == 0b110 else 3 if byte >> 4 == 0b1110 else 4 if byte >> 3 == 0b11110 else 0
        if back < length:
            return length - back
    return 0


def _closed(text: bytes) -> bytes:
    """Remove an incomplete character of up to three bytes at the end."""
    for back in range(1, min(3, len(text)) + 1):
        if text[-back] >= 0b11000000:
            return text[:-back]
    return text


def _shown(text: bytes) -> str:
    """Decode like llama.cpp's JSON: invalid UTF-8 becomes U+FFFD."""
    return text.decode(errors="replace")
