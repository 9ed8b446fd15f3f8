"""Compiles one grammar, read from its standard input, in a process that is thrown away: the exit status says what came
of it. Run by its path, so that nothing but llguidance has to be imported."""

from __future__ import annotations

import resource
import sys

__all__ = ["main"]

_CPU_S = 2
_MEMORY_BYTES = 256 * 2**20  # of addresses; the interpreter and the library take 28 of them


def main() -> int:
    """0 if it compiles, 3 if no answer could conform to it, 4 otherwise; killed by a signal where it takes too much."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0)
    matcher.compute_bitmask()  # the first step of the way, where more is compiled
    if not matcher.is_error():
        return 0
    return 3 if "nsatisfiable" in matcher.get_error() else 4


if __name__ == "__main__":
    sys.exit(main())
