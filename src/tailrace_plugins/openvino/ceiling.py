"""Measures OpenVINO's matrix multiplication on this machine: the upper limit of a model's compute speed.

With eight-bit weights it multiplies integers, which is several times faster than float32, whatever precision is
requested. So this uses OpenVINO's own kernels with the engine's precision and threads.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from tailrace.engines import EngineSpec

__all__ = ["operations_per_s"]

_SHAPES = ((16, 1024), (64, 1024), (256, 1024), (64, 2048))  # (rows of the input, size of the square weight matrix)
_LAYERS = 4
_ROUNDS = 12


def operations_per_s(spec: EngineSpec, *, in_eight_bits: bool) -> float:
    """Return the highest number of multiplications and additions per second, for shapes that fit into the CPU
    caches."""
    properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"} if spec.exact else {}  # Any: as the library has it
    if spec.threads:
        properties["INFERENCE_NUM_THREADS"] = spec.threads
    core = ov.Core()
    return max(_measured(core, properties, rows, size, in_eight_bits) for rows, size in _SHAPES)


def _measured(core: Any, properties: dict[str, Any], rows: int, size: int, in_eight_bits: bool) -> float:
    """Measure one shape; takes the fastest of several rounds. Any: the library's objects."""
    random = np.random.default_rng(1)
    parameter = ops.parameter([-1, size], np.float32)
    value: Any = parameter
    for _ in range(_LAYERS):
        if in_eight_bits:
            numbers = ops.convert(ops.constant(random.integers(-127, 127, (size, size), dtype=np.int8)), "f16")
            scales = ops.constant(np.full((size, 1), 1e-3, np.float16))
            weights = ops.convert(ops.multiply(numbers, scales), "f32")
        else:
            weights = ops.constant(random.standard_normal((size, size), dtype=np.float32) / size)
        value = ops.matmul(value, weights, False, True)
    request = core.compile_model(ov.Model([ops.result(value)], [parameter]), "CPU", properties).create_infer_request()
    given = np.ones((rows, size), np.float32)
    request.infer([given])
    took_s = []
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        request.infer([given])
        took_s.append(time.perf_counter() - began_s)
    return 2 * rows * size * size * _LAYERS / min(took_s)
