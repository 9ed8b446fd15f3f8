"""Compiles one grammar from standard input in a short-lived process. The exit status is the result. Run by its path, so
that it imports only llguidance."""

from __future__ import annotations

import re
import resource
import sys
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["STEP_ITEMS", "main"]

# Items of the parser for one token. The library's own limit is 50,000, at which an ambiguous grammar takes 0.3 s for
# each token; at this one it fails after 25 ms.
STEP_ITEMS = 20_000
CPU_S = 2
_NUM_WALKS = 3
_NUM_BYTES = 200
MEMORY_BYTES = 256 * 2**20  # of address space; the interpreter and the library need 28 MB


def main() -> int:
    """Check the grammar. Returns 0 if it can be used, 3 if it is unsatisfiable, 4 if it does not compile, 5 if it
    exceeds the budget. If it does not compile, prints the line, if the library says it. If compiling exceeds the time,
    a signal kills the process."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        limits = LLParserLimits(step_max_items=STEP_ITEMS)
        matcher = LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0, limits=limits)
        matcher.compute_bitmask()  # the first step compiles more
        if matcher.is_error():
            error = matcher.get_error()
            line = re.match(r"(?:at )?(\d+)\(\d+\):", error)
            sys.stdout.write(line[1] if line else "")
            return 3 if "nsatisfiable" in error else 4
        walks = [_walk(matcher.deep_copy(), seed) for seed in range(_NUM_WALKS)]
    except MemoryError:
        return 5
    except BaseException:  # a panic of the library, which is no `Exception`
        return 4
    return 0 if all(walks) else 5


def _walk(matcher: LLMatcher, seed: int) -> bool:
    """Return whether the library can generate an answer of random bytes. It computes states lazily, and fails if there
    are too many: `(z{5,}){64}` compiles, and fails at its second token."""
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
