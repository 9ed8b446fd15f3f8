"""Reads context-free grammars: GBNF, as users of llama.cpp and vLLM write them, or Lark, as llguidance has it."""

from __future__ import annotations

import re

__all__ = ["to_lark"]

_GBNF_RULE = re.compile(r"^\s*[A-Za-z][\w-]*\s*::=", re.MULTILINE)


def to_lark(text: str) -> str:
    """Return the grammar in Lark. Takes up to a second. Raises: ValueError, which says what is wrong with it."""
    if not _GBNF_RULE.search(text):
        return text
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark  # not when a server starts

    try:
        return gbnf_to_lark(text)
    except GbnfToLarkError as error:
        line = text.count("\n", 0, error.pos.pos) + 1
        raise ValueError(f"line {line} cannot be read") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception:  # the library has no type of its own for it
        raise ValueError("the rule root, or a rule that another one names, is missing") from None
