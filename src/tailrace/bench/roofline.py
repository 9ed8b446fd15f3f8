"""How fast this machine reads memory and computes, measured with numpy: `python -m tailrace.bench.roofline`.

A token of one stream takes reading all weights once, so that memory is the limit of one stream; with many streams each
weight that was read serves all of them, and arithmetic is. Both together are the model's roofline here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from tailrace.bench.machine import num_cores

__all__ = ["main"]

_ROUNDS = 7
_READ_BYTES = 512 * 2**20  # more than any cache holds
_MATRIX = 1536


def _best(run: Callable[[], object]) -> float:
    """The shortest of some rounds, in seconds: what other work on the machine costs is not the machine's."""
    run()
    took_s = []
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        run()
        took_s.append(time.perf_counter() - began_s)
    return min(took_s)


def main() -> None:
    """Writes bytes read and float32 operations, each per second, as a JSON array."""
    cores = num_cores()
    pieces = [np.ones(_READ_BYTES // 8 // cores) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as threads:
        read_s = _best(lambda: list(threads.map(np.max, pieces)))
    matrix = np.ones((_MATRIX, _MATRIX), np.float32)
    multiplied_s = _best(lambda: matrix @ matrix)
    found = (cores * pieces[0].nbytes / read_s, 2 * _MATRIX**3 / multiplied_s)
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
