"""Follows what llama.cpp answers under a grammar, since nothing is sure there.

It has llguidance in its build, and goes on without any grammar where that cannot compile one or runs out of its budget:
with status 200, and a line in its log. So the same library stands beside it, and a token that may not be there ends the
sequence in an error.
"""

from __future__ import annotations

from functools import cache

from llguidance import LLMatcher, LLTokenizer

from tailrace.engines.grammars.guidance import to_guidance
from tailrace.errors import SequenceFailed
from tailrace.types import Grammar

__all__ = ["GrammarFollower"]


class GrammarFollower:
    """Goes along with an answer, byte by byte. Raises: SequenceFailed if the grammar does not compile."""

    def __init__(self, grammar: Grammar) -> None:
        self._matcher = LLMatcher(_bytes(), to_guidance(grammar), log_level=0)
        if self._matcher.is_error():
            raise SequenceFailed("the grammar does not compile")

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def take(self, piece: bytes) -> bool:
        """The next bytes. False if they may not stand there."""
        return self._matcher.try_consume_tokens(list(piece)) == len(piece)


@cache
def _bytes() -> LLTokenizer:
    """A vocabulary of the 256 bytes."""
    return LLTokenizer("byte")
