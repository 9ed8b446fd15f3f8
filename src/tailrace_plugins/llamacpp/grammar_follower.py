"""Checks that llama.cpp's answers follow their grammar.

llama.cpp uses llguidance, and continues without the grammar if that cannot compile it or exceeds its budget: with
status 200 and a line in its log. So the same library checks the answer here, and a token that the grammar does not
allow ends the sequence with an error.
"""

from __future__ import annotations

from functools import cache

from llguidance import LLMatcher, LLTokenizer

from tailrace.engines.grammars.guidance import control_names, to_guidance
from tailrace.errors import SequenceFailed
from tailrace.types import Grammar

__all__ = ["GrammarFollower"]


class GrammarFollower:
    """Checks an answer byte by byte. Raises: SequenceFailed if the grammar does not compile."""

    def __init__(self, grammar: Grammar) -> None:
        self._matcher = LLMatcher(_bytes(), to_guidance(grammar, as_text=True), log_level=0)
        self._names = {token_id: name.encode() for token_id, name in control_names(grammar).items()}  # have no bytes
        if self._matcher.is_error():
            raise SequenceFailed("the grammar does not compile")

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def take(self, token_id: int, piece: bytes) -> bool:
        """Take the next token, with its bytes. Returns False if the grammar does not allow it."""
        piece = self._names.get(token_id, piece)
        return self._matcher.try_consume_tokens(list(piece)) == len(piece)


@cache
def _bytes() -> LLTokenizer:
    """Return a vocabulary of the 256 bytes."""
    return LLTokenizer("byte")
