"""What packed weights multiply inputs with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace_plugins.openvino.packer import MERGED
from tailrace_plugins.openvino.prepared import Weights
from tailrace_plugins.openvino.weights import Form, Packed

__all__ = ["unpacked", "unpacked_model"]

Numbers = NDArray[np.float32]


def unpacked(packed: Packed, form: Form, columns: int) -> Numbers:
    """Return the numbers of a packed matrix, (rows, columns)."""
    codes: NDArray[Any] = packed.codes
    if form.bits == 16:
        return codes.astype(np.float32)
    if form.bits == 4:
        halves = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
        codes = (halves ^ 8).astype(np.int8) - 8
    values: Numbers = (codes * packed.scales).reshape(len(codes), -1).astype(np.float32)
    if not form.has_sums:
        return values
    first, second = np.split(values[:, columns:], 2, 1)
    return values[:, :columns] + np.repeat((first + second)[:, : columns // 32], 32, 1)


def unpacked_model(weights: Weights, num_layers: int) -> dict[str, Numbers]:
    """Return the matrices of a model by their names in transformers."""
    names = {"embedding": "model.embed_tokens", "head": "lm_head"}
    for layer in range(num_layers):
        for short in ("q", "k", "v", "o", "gate", "up", "down"):
            long = f"self_attn.{short}_proj" if short in "qkvo" else f"mlp.{short}_proj"
            names[f"layers.{layer}.{short}"] = f"model.layers.{layer}.{long}"
    found: dict[str, NDArray[np.float32]] = {}
    keys = [tuple(f"layers.{layer}.{short}" for short in group) for layer in range(num_layers) for group in MERGED]
    for group in [("embedding",), *keys, *([("head",)] if "head" in weights else [])]:
        for matrix in weights.matrices(group):
            values = unpacked(matrix.packed, matrix.form, matrix.num_columns)
            parts = np.split(values, np.cumsum(matrix.sizes)[:-1])
            found |= {names[name]: part for name, part in zip(matrix.names, parts, strict=True)}
    return found
