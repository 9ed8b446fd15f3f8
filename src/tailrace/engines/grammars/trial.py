"""Compiles one grammar, read from its standard input, in a process that is thrown away: the exit status says what came
of it. Run by its path, so that nothing but llguidance has to be imported."""

from __future__ import annotations

import resource
import sys
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["main"]

CPU_S = 2
_NUM_WALKS = 3
_NUM_BYTES = 200
MEMORY_BYTES = 256 * 2**20  # of addresses; the interpreter and the library take 28 of them


def main() -> int:
    """0 if it can be used, 3 if no answer could conform to it, 4 if it does not compile, 5 if an answer takes too much;
    killed by a signal where compiling does."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0)
    matcher.compute_bitmask()  # the first step of the way, where more is compiled
    if matcher.is_error():
        return 3 if "nsatisfiable" in matcher.get_error() else 4
    for seed in range(_NUM_WALKS):
        if not _walk(matcher.deep_copy(), seed):
            return 5
    return 0


def _walk(matcher: LLMatcher, seed: int) -> bool:
    """Whether the library gets through an answer of random bytes. It computes states as they come, and gives up where
    these are too many: `(z{5,}){64}` compiles, and fails at its second token."""
    rnd = Random(seed)
    for _ in range(_NUM_BYTES):
        if matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if not allowed:
            break
        matcher.consume_token(allowed[0] if seed == 0 else rnd.choice(allowed))
    return not matcher.is_error()


if __name__ == "__main__":
    sys.exit(main())
