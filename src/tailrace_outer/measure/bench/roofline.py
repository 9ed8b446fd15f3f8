"""Measures the speed of memory and arithmetic with numpy: `python -m tailrace_outer.measure.bench.roofline`.

Each token of a single stream reads all weights once, so memory limits one stream. With many streams, all of them share
each read weight, so arithmetic is the limit. Both together are the model's roofline on this machine.

The test reads as much memory as the weights need, because part of them may stay in a cache. Arithmetic is measured in
float32 with numpy, and with the kernels of the engine, if it measures them (`Kind.operations_per_s`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pkgutil import resolve_name

import msgspec
import numpy as np

from tailrace.engines.kinds import find_kind
from tailrace.system.child import begin_child
from tailrace.system.processors import usable_processors
from tailrace_outer.measure.bench.machine import MeasurePlan

__all__ = ["main"]

_ROUNDS = 7
_READ_BYTES = 512 * 2**20  # more than most caches hold
_LEAST_READ_BYTES = 16 * 2**20
_MATRIX = 1536


def _best(run: Callable[[], object]) -> float:
    """Return the shortest of several rounds, in seconds: other processes can only make a round slower."""
    run()
    took_s = []
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        run()
        took_s.append(time.perf_counter() - began_s)
    return min(took_s)


def main() -> None:
    """Arguments: the parent's process id, with which this process ends, and a MeasurePlan in JSON. Writes a JSON array
    of bytes read, float32 operations, and operations of the engine's kernels (0 if not measured), each per second."""
    begin_child(int(sys.argv[1]))
    plan = msgspec.json.decode(sys.argv[2], type=MeasurePlan)
    cores = usable_processors()
    read_bytes = min(_READ_BYTES, max(plan.weight_bytes, _LEAST_READ_BYTES)) if plan.weight_bytes else _READ_BYTES
    pieces = [np.ones(read_bytes // 8 // cores) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as threads:
        read_s = _best(lambda: list(threads.map(np.max, pieces)))
    matrix = np.ones((_MATRIX, _MATRIX), np.float32)
    multiplied_s = _best(lambda: matrix @ matrix)
    engine_ops_per_s = 0.0
    if plan.engine is not None and (kind := find_kind(plan.engine.engine)) is not None:
        engine_ops_per_s = resolve_name(kind.operations_per_s)(plan.engine, in_eight_bits=plan.in_eight_bits)
    found = (cores * pieces[0].nbytes / read_s, 2 * _MATRIX**3 / multiplied_s, engine_ops_per_s)
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
