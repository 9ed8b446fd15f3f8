"""An encoder in OpenVINO's operations.

The tokens of all sequences of a step lie one after the other, in [tokens], so that linear layers compute no padding.
Only attention needs a rectangle: `cells` says which token is in each cell of [sequences, longest], and `rows` which
cells have a token. Pooling is a product with the matrix `pool`, [sequences, tokens]. The result is one vector
for each sequence, or one score.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

from tailrace.errors import ModelError
from tailrace_plugins.openvino.decoder import new_input
from tailrace_plugins.openvino.encoder_families import EncoderShape
from tailrace_plugins.openvino.sources import Raw, tensors_of
from tailrace_plugins.openvino.weights import floats

__all__ = ["EncoderWeights", "build"]

Node: TypeAlias = Any  # the library's nodes and outputs, which its stubs do not type


class EncoderWeights:
    """The tensors of a Hugging Face directory or a GGUF file by the names of `encoder_families`, in float32."""

    def __init__(self, encoder: EncoderShape, path: Path) -> None:
        """Raises: ModelError; OSError."""
        self._encoder = encoder
        self._tensors = tensors_of(path)

    def vector(self, name: str, kind: str) -> npt.NDArray[np.float32]:
        return self._floats(name, kind).reshape(-1)

    def matrix(self, name: str) -> npt.NDArray[np.float32]:
        return self._floats(name, "weight")

    def _floats(self, name: str, kind: str) -> npt.NDArray[np.float32]:
        """Raises: ModelError if the file has no such tensor, or one of another size."""
        tensor = f"{self._encoder.name_of(name)}.{kind}"
        raw = self._find(f"{self._encoder.prefix}{tensor}") or self._find(tensor)
        if raw is None:
            raise ModelError(f"The model lacks the tensor {tensor}.")
        return floats(raw)

    def _find(self, name: str) -> Raw | None:
        older = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        return self._tensors.get(name) or self._tensors.get(older)


def build(encoder: EncoderShape, weights: EncoderWeights) -> Any:  # Any: the library's model
    """Return the model. Raises: ModelError if a tensor is missing; the library's RuntimeError for one of another
    size."""
    return _Builder(encoder, weights).model()


class _Builder:
    def __init__(self, encoder: EncoderShape, weights: EncoderWeights) -> None:
        self._shape = encoder
        self._weights = weights
        self._flat = {name: new_input(name, np.int32, [-1]) for name in ("ids", "positions", "types", "rows")}
        self._cells = new_input("cells", np.int32, [-1, -1])
        self._mask = new_input("mask", np.float32, [-1, 1, 1, -1])  # is added to the scores of attention
        self._pool = new_input("pool", np.float32, [-1, -1])

    def model(self) -> Any:
        shape = self._shape
        hidden = ops.add(self._rows_of("tokens", "ids"), self._rows_of("positions", "positions"))
        if "types" in shape.other_names:
            hidden = ops.add(hidden, self._rows_of("types", "types"))
        hidden = self._norm("first_norm", hidden)
        for layer in range(shape.num_layers):
            hidden = self._layer(f"layers.{layer}", hidden)
        result = ops.matmul(self._pool, hidden, False, False)
        if shape.task == "rank":
            first = self._linear(("head.first",), result)
            active = ops.tanh(first) if shape.head_activation == "tanh" else ops.relu(first)
            result = self._linear(("head.last",), active)
        inputs = [given for name, given in self._flat.items() if name != "types" or "types" in shape.other_names]
        return ov.Model([ops.result(result, name="vectors")], [*inputs, self._cells, self._mask, self._pool])

    def _rows_of(self, name: str, given: str) -> Node:
        table = ops.constant(self._weights.matrix(name))
        return ops.gather(table, self._flat[given], ops.constant(np.int32(0)))

    def _layer(self, name: str, hidden: Node) -> Node:
        shape = self._shape
        attended = self._linear((f"{name}.o",), self._attention(name, hidden))
        hidden = self._norm(f"{name}.attention_norm", ops.add(hidden, attended))
        given = self._linear((f"{name}.up",), hidden)
        active = ops.relu(given) if shape.activation == "relu" else ops.gelu(given, shape.activation)
        return self._norm(f"{name}.mlp_norm", ops.add(hidden, self._linear((f"{name}.down",), active)))

    def _attention(self, name: str, hidden: Node) -> Node:
        """Return the results of all heads, [tokens, heads * size]."""
        shape, axis = self._shape, ops.constant(np.int32(0))
        all_three = self._linear(tuple(f"{name}.{kind}" for kind in "qkv"), hidden)
        padded = ops.gather(all_three, self._cells, axis)
        parts = ops.variadic_split(padded, np.int64(-1), np.array([shape.hidden_size] * 3, np.int64))
        heads = np.array([0, 0, shape.num_heads, shape.head_size])
        order = np.array([0, 2, 1, 3])
        queries, keys, values = (
            ops.transpose(ops.reshape(parts.output(index), heads, True), order) for index in range(3)
        )
        mixed = ops.transpose(ops.scaled_dot_product_attention(queries, keys, values, self._mask), order)
        return ops.gather(ops.reshape(mixed, np.array([-1, shape.hidden_size]), False), self._flat["rows"], axis)

    def _norm(self, name: str, given: Node) -> Node:
        """Return a norm of mean and variance over the last axis."""
        even = ops.mvn(given, np.array([-1]), True, self._shape.epsilon, "inside_sqrt")
        weight, bias = (ops.constant(self._weights.vector(name, kind)) for kind in ("weight", "bias"))
        return ops.add(ops.multiply(even, weight), bias)

    def _linear(self, names: tuple[str, ...], given: Node) -> Node:
        """Return the results of linear layers with the same inputs, one behind the other."""
        matrix = np.concatenate([self._weights.matrix(name) for name in names])
        bias = np.concatenate([self._weights.vector(name, "bias") for name in names])
        return ops.add(ops.matmul(given, ops.constant(matrix), False, True), ops.constant(bias))
