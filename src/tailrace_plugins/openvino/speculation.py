"""Speculation: guesses of the next tokens, which one step checks together.

A guess is right if the row chooses the same token from the logits after the tokens before it. So the answer is the same
as in a batch without guesses: only the number of steps changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Drafted", "Guesser", "PromptLookup"]

_NGRAM = 3  # last tokens whose earlier occurrence gives the guess
_FORGETS = 0.8  # of the earlier share of right guesses, with each check
_LEAST = 0.25  # share of right guesses below which guessing costs more than it saves
_TRIES_EACH = 24  # tokens, after which a row guesses again although its guesses were wrong
_FOLLOWS = 0.1  # of a draft model's share of right guesses, with each guess that was checked


class Guesser(Protocol):
    """Where guesses for one sequence come from."""

    def note(self, num_guessed: int, num_right: int, num_tokens: int) -> None:
        """Note how many of the last guesses were right, when the text had `num_tokens` tokens."""


class PromptLookup:
    """Guesses that an earlier part of the text repeats, for one sequence."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._after: dict[tuple[int, ...], int] = {}  # where the text goes on after an n-gram
        self._num_read = 0
        self._share = 1.0
        self._tried_at = 0

    def guess(self, token_ids: Sequence[int]) -> list[int]:
        """Return guesses of the tokens after these."""
        self._read(token_ids)
        if self._share < _LEAST and len(token_ids) - self._tried_at < _TRIES_EACH:
            return []
        start = self._after.get(tuple(token_ids[-_NGRAM:]))
        return [] if start is None else list(token_ids[start : start + self._most])

    def note(self, num_guessed: int, num_right: int, num_tokens: int) -> None:
        if num_guessed:
            self._share = _FORGETS * self._share + (1 - _FORGETS) * num_right / num_guessed
            self._tried_at = num_tokens

    def _read(self, token_ids: Sequence[int]) -> None:
        """Note where each n-gram ends, but not the last one, after which nothing is known yet."""
        for end in range(max(self._num_read, _NGRAM), len(token_ids)):
            self._after[tuple(token_ids[end - _NGRAM : end])] = end
        self._num_read = len(token_ids)


@dataclass(slots=True)
class Drafted:
    """What a draft model has read of one sequence, and how good its guesses are."""

    num_done: int  # tokens whose keys and values it has
    share: float  # of right guesses, among those before which none was wrong
    num_fed: int = 0  # guesses whose keys and values it has after those

    def note(self, num_guessed: int, num_right: int, num_tokens: int) -> None:
        self.num_done += min(num_right, self.num_fed)
        for index in range(min(num_right + 1, num_guessed)):
            self.share += _FOLLOWS * ((index < num_right) - self.share)
