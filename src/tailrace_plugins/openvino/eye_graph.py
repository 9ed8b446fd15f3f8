"""A vision tower and its projector in OpenVINO's operations.

The input is one square of an image, `pixels` in [1, 3, side, side]. The result is the rows that its tokens get in the
decoder, [rows, hidden]. All shapes are fixed, so the same square always gives the same bits.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

from tailrace_plugins.openvino.decoder import new_input
from tailrace_plugins.openvino.eye_shapes import EyeShape

__all__ = ["EyeWeights", "build_eye"]

Node: TypeAlias = Any  # the library's nodes and outputs, which its stubs do not type
Numbers: TypeAlias = npt.NDArray[np.float32]


class EyeWeights(Protocol):
    """The tensors of an eye in float32. Names: `patch`, `positions`, `class`, `first_norm` and `last_norm`;
    `layers.N.` with `before_attention`, `q`, `k`, `v`, `o`, `before_mlp`, `up` and `down`; `projector.` with `first`
    and, of two layers, `last`, and with `norm`."""

    def get(self, name: str, kind: str, *shape: int) -> Numbers:
        """Return the tensor `weight` or `bias` of a name. Raises: ModelError if there is none of this shape."""

    def has(self, name: str, kind: str) -> bool: ...


def build_eye(eye: EyeShape, weights: EyeWeights) -> Any:  # Any: the library's model
    """Return the model. Raises: ModelError if a tensor is missing or has another shape."""
    return _Builder(eye, weights).model()


class _Builder:
    def __init__(self, eye: EyeShape, weights: EyeWeights) -> None:
        self._shape = eye
        self._weights = weights

    def model(self) -> Any:
        shape = self._shape
        pixels = new_input("pixels", np.float32, [1, 3, shape.image_side, shape.image_side])
        hidden = self._patches(pixels)
        if shape.has_class:
            hidden = self._norm("first_norm", hidden)
        for layer in range(shape.num_layers):
            hidden = self._layer(f"layers.{layer}", hidden)
        if shape.has_last_norm:
            hidden = self._norm("last_norm", hidden)
        rows = {"shuffle": self._shuffled, "pool": self._pooled, "mlp": self._through_mlp}[shape.projector](hidden)
        return ov.Model([ops.result(rows, name="rows")], [pixels])

    def _patches(self, pixels: Node) -> Node:
        """Return a row for each patch with its position, [patches, hidden]."""
        shape, side = self._shape, self._shape.patch_side
        filters = ops.constant(self._weights.get("patch", "weight", shape.hidden_size, 3, side, side))
        zeros = np.array([0, 0])
        found = ops.convolution(pixels, filters, np.array([side, side]), zeros, zeros, np.array([1, 1]))
        rows = _turned(ops.reshape(found, np.array([shape.hidden_size, -1]), False), 1, 0)
        if self._weights.has("patch", "bias"):
            rows = ops.add(rows, self._vector("patch", "bias"))
        if shape.has_class:
            own = self._weights.get("class", "weight", shape.hidden_size).reshape(1, -1)
            rows = ops.concat([ops.constant(own), rows], 0)
        count = shape.num_patches + shape.has_class
        positions = self._weights.get("positions", "weight", count, shape.hidden_size)
        return ops.add(rows, ops.constant(positions[self._position_indexes()]))

    def _position_indexes(self) -> npt.NDArray[np.intp]:
        """Return which position each row has. Idefics3 calculates them from shares of the side in float32, so with
        some sides a patch has the position of the one before."""
        shape, along = self._shape, self._shape.patches_along
        if shape.projector != "shuffle":
            return np.arange(shape.num_patches + shape.has_class)
        bounds = (np.arange(1, along) * (1 / along)).astype(np.float32)
        shares = np.arange(along, dtype=np.float32) * (np.float32(1) / np.float32(along))
        found = np.searchsorted(bounds, np.minimum(shares, np.float32(1 - 1e-6)), side="right")
        indexes: npt.NDArray[np.intp] = (found[:, None] * along + found[None]).reshape(-1)
        return indexes

    def _layer(self, name: str, hidden: Node) -> Node:
        shape = self._shape
        attended = self._attention(name, self._norm(f"{name}.before_attention", hidden))
        hidden = ops.add(hidden, self._linear(f"{name}.o", attended, shape.hidden_size, shape.hidden_size))
        given = self._norm(f"{name}.before_mlp", hidden)
        active = _active(self._linear(f"{name}.up", given, shape.mlp_size, shape.hidden_size), shape.activation)
        return ops.add(hidden, self._linear(f"{name}.down", active, shape.hidden_size, shape.mlp_size))

    def _attention(self, name: str, hidden: Node) -> Node:
        """Return the results of all heads, [rows, heads * size]."""
        shape, size = self._shape, self._shape.hidden_size
        heads = np.array([1, -1, shape.num_heads, size // shape.num_heads])
        queries, keys, values = (
            _turned(ops.reshape(self._linear(f"{name}.{kind}", hidden, size, size), heads, False), 0, 2, 1, 3)
            for kind in "qkv"
        )
        mixed = _turned(ops.scaled_dot_product_attention(queries, keys, values), 0, 2, 1, 3)
        return ops.reshape(mixed, np.array([-1, size]), False)

    def _shuffled(self, hidden: Node) -> Node:
        """Put the rows of neighbours one behind the other, then a linear layer."""
        shape = self._shape
        size = shape.hidden_size * shape.merged**2
        return self._linear(
            "projector.first",
            ops.reshape(self._neighbours(hidden), np.array([-1, size]), False),
            shape.output_size,
            size,
        )

    def _pooled(self, hidden: Node) -> Node:
        """Take the mean of neighbours, then a root-mean-square norm and a linear layer."""
        shape = self._shape
        squares = ops.reshape(self._neighbours(hidden), np.array([-1, shape.merged**2, shape.hidden_size]), False)
        means = ops.reduce_mean(squares, np.array([1]), False)
        spread = ops.reduce_mean(ops.multiply(means, means), np.array([-1]), True)
        even = ops.divide(means, ops.sqrt(ops.add(spread, ops.constant(np.float32(shape.epsilon)))))
        weight = self._weights.get("projector.norm", "weight", shape.hidden_size) + np.float32(shape.norm_offset)
        return self._linear(
            "projector.first", ops.multiply(even, ops.constant(weight)), shape.output_size, shape.hidden_size
        )

    def _neighbours(self, hidden: Node) -> Node:
        """Return the patches in the order of their squares, [squares along, squares along, merged, merged, hidden]."""
        shape = self._shape
        squares, merged = shape.patches_along // shape.merged, shape.merged
        grid = ops.reshape(hidden, np.array([squares, merged, squares, merged, shape.hidden_size]), False)
        return _turned(grid, 0, 2, 1, 3, 4)

    def _through_mlp(self, hidden: Node) -> Node:
        shape = self._shape
        if shape.has_class and not shape.keeps_class:
            first = np.array([1])
            hidden = ops.slice(hidden, first, np.array([shape.num_patches + 1]), first, np.array([0]))
        given = self._linear("projector.first", hidden, shape.output_size, shape.hidden_size)
        active = _active(given, shape.projector_activation)
        return self._linear("projector.last", active, shape.output_size, shape.output_size)

    def _norm(self, name: str, given: Node) -> Node:
        """Return a norm of mean and variance over the last axis."""
        even = ops.mvn(given, np.array([-1]), True, self._shape.epsilon, "inside_sqrt")
        return ops.add(ops.multiply(even, self._vector(name, "weight")), self._vector(name, "bias"))

    def _vector(self, name: str, kind: str) -> Node:
        return ops.constant(self._weights.get(name, kind, self._shape.hidden_size))

    def _linear(self, name: str, given: Node, rows: int, columns: int) -> Node:
        product = ops.matmul(given, ops.constant(self._weights.get(name, "weight", rows, columns)), False, True)
        if not self._weights.has(name, "bias"):
            return product
        return ops.add(product, ops.constant(self._weights.get(name, "bias", rows)))


def _active(given: Node, activation: str) -> Node:
    if activation == "quick":
        return ops.multiply(given, ops.sigmoid(ops.multiply(given, ops.constant(np.float32(1.702)))))
    return ops.gelu(given, "tanh" if activation == "tanh" else "erf")


def _turned(given: Node, *order: int) -> Node:
    return ops.transpose(given, np.array(order))
