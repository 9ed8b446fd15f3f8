"""Which answers a grammar allows."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer

from tailrace.engines.grammars.guidance import to_guidance
from tailrace.types import Grammar

__all__ = ["allows"]


def allows(grammar: Grammar, text: str) -> bool:
    """Return whether this is a whole answer."""
    matcher = LLMatcher(LLTokenizer("byte"), to_guidance(grammar, as_text=True), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    given = list(text.encode())
    return matcher.try_consume_tokens(given) == len(given) and matcher.is_accepting()
