"""How fast OpenVINO multiplies on this machine: the ceiling of a model's arithmetic.

With weights of eight bits it multiplies integers, several times as fast as float32, whatever precision is asked for. So
the ceiling is measured with its own kernels, with the precision and the threads that the engine has.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from tailrace.engines.protocol import EngineSpec

__all__ = ["operations_per_s"]

_SHAPES = ((16, 1024), (64, 1024), (256, 1024), (64, 2048))  # rows, and rows and columns of each matrix of weights
_LAYERS = 4
_ROUNDS = 12


def operations_per_s(spec: EngineSpec, *, in_eight_bits: bool) -> float:
    """The most multiplications and additions in a second, of several shapes whose weights stay in the caches."""
    properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"} if spec.exact else {}  # Any: as the library has it
    if spec.threads:
        properties["INFERENCE_NUM_THREADS"] = spec.threads
    core = ov.Core()
    return max(_measured(core, properties, rows, size, in_eight_bits) for rows, size in _SHAPES)


def _measured(core: Any, properties: dict[str, Any], rows: int, size: int, in_eight_bits: bool) -> float:
    """Of one shape, in the shortest of some rounds. Any: the library's objects."""
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
