"""How fast this machine reads memory and computes, measured with numpy: `python -m tailrace.measure.bench.roofline`.

A token of one stream takes reading all weights once, so that memory is the limit of one stream; with many streams each
weight that was read serves all of them, and arithmetic is. Both together are the model's roofline here.

As much memory is read as the weights take, since a part of them may stay in a cache. Arithmetic is measured in float32
with numpy, and with OpenVINO's own kernels where that is the engine: it computes with integers of eight bits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from tailrace.child import begin_child
from tailrace.engines import EngineSpec
from tailrace.measure.bench.machine import num_cores

__all__ = ["Wish", "main"]

_ROUNDS = 7
_READ_BYTES = 512 * 2**20  # more than most caches hold
_LEAST_READ_BYTES = 16 * 2**20
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


class Wish(msgspec.Struct, frozen=True):
    """What is measured."""

    weight_bytes: int = 0  # of the model; 0: not known
    openvino: EngineSpec | None = None  # what OpenVINO would load, where that is the engine
    in_eight_bits: bool = False  # the weights have eight bits or fewer


def main() -> None:
    """Takes as arguments its parent's process id, with which it ends, and a Wish in JSON. Writes bytes read, float32
    operations, and operations of the engine's own kernels (0 if they were not measured), each per second, as a JSON
    array."""
    begin_child(int(sys.argv[1]))
    wish = msgspec.json.decode(sys.argv[2], type=Wish)
    cores = num_cores()
    read_bytes = min(_READ_BYTES, max(wish.weight_bytes, _LEAST_READ_BYTES)) if wish.weight_bytes else _READ_BYTES
    pieces = [np.ones(read_bytes // 8 // cores) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as threads:
        read_s = _best(lambda: list(threads.map(np.max, pieces)))
    matrix = np.ones((_MATRIX, _MATRIX), np.float32)
    multiplied_s = _best(lambda: matrix @ matrix)
    engine_ops_per_s = 0.0
    if wish.openvino is not None:
        from tailrace.engines.openvino.ceiling import operations_per_s

        engine_ops_per_s = operations_per_s(wish.openvino, in_eight_bits=wish.in_eight_bits)
    found = (cores * pieces[0].nbytes / read_s, 2 * _MATRIX**3 / multiplied_s, engine_ops_per_s)
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
