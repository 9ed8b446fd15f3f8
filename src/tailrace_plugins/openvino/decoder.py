"""A decoder in OpenVINO's operations, with paged attention.

All inputs are flat: the new tokens of all sequences one after the other, in [tokens]. The results are the logits of the
tokens whose indexes are `sampled`, in [sampled, vocabulary]; the last layer's MLP is computed only for these. The
library chooses the shapes of the KV cache when it compiles the model.

A model that reads images has more inputs: the rows of images, `image_rows`, [rows, hidden], and the positions of the
tokens that have them instead of those of the embedding, `image_positions`, [rows]. Both are empty in a step without
images. In some models the tokens of an image see each other, also those that come later: `token_types`, [tokens] or
empty, has a 1 for each of them, and an image is never cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops
from openvino.op import Parameter

from tailrace_plugins.openvino.families import Decoder, Rope
from tailrace_plugins.openvino.openvino_adapters import Branches
from tailrace_plugins.openvino.openvino_names import PagedAttention
from tailrace_plugins.openvino.packer import MERGED
from tailrace_plugins.openvino.prepared import Matrix, Weights
from tailrace_plugins.openvino.weights import GROUP

__all__ = ["Images", "build", "layer_names", "new_input", "without_images"]

Node: TypeAlias = Any  # the library's nodes and outputs, which its stubs do not type
Images: TypeAlias = Literal[
    "", "causal", "mutual"
]  # whether a model reads them, and whether their tokens see each other

_HF_NAMES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def layer_names(decoder: Decoder) -> dict[str, str]:
    """Return the names of linear layers in Hugging Face's models, which adapters use, by the names here."""
    return {
        f"layers.{layer}.{short}": f"model.layers.{layer}.{long}"
        for layer in range(decoder.num_layers)
        for short, long in _HF_NAMES.items()
    }


def build(decoder: Decoder, weights: Weights, branches: Branches, images: Images = "", *, has_head: bool = True) -> Any:
    """Return the model; Any: the library's. Its constants are those of `weights`, which are not copied. Without a head,
    its results are the hidden states of the sampled tokens, in [sampled, hidden], instead of their logits."""
    return _Builder(decoder, weights, branches, images).model(has_head=has_head)


def without_images(model: Any) -> None:  # Any: the library's model
    """Remove the inputs for images from a model that may have them."""
    for port in model.inputs:
        node = port.get_node()
        if port.any_name == "image_rows":
            (given,) = port.get_target_inputs()
            scatter = given.get_node()
            scatter.output(0).replace(scatter.input_value(0))
        if port.any_name == "token_types":
            node.output(0).replace(_none(np.int32).output(0))
        if port.any_name in IMAGE_INPUTS:
            model.remove_parameter(node)


class _Builder:
    def __init__(self, decoder: Decoder, weights: Weights, branches: Branches, images: Images) -> None:
        self._shape = decoder
        self._weights = weights
        self._branches = branches
        self._sums = _Sums()
        self._caches: list[Node] = []
        self._input_ids = new_input("input_ids", np.int64, [-1])
        self._positions = new_input("position_ids", np.int64, [-1])
        self._sampled = new_input("sampled", np.int64, [-1])
        names = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
        self._paging = [new_input(name, np.int32, [-1]) for name in names]
        self._longest = new_input("max_context_len", np.int32, [])
        self._adapters = new_input("adapters", np.int64, [-1]) if branches.adapters else None
        self._numbers = self._adapters  # of the rows of the current layer
        self._image_rows = new_input("image_rows", np.float32, [-1, decoder.hidden_size]) if images else None
        self._image_positions = new_input("image_positions", np.int64, [-1]) if images else None
        self._types = new_input("token_types", np.int32, [-1]) if images == "mutual" else None
        self._angles: dict[Rope, tuple[Node, Node]] = {}

    def model(self, *, has_head: bool) -> Any:
        shape = self._shape
        hidden = _scaled(self._embedding(self._input_ids), shape.embedding_scale)
        if self._image_rows is not None:
            hidden = ops.scatter_update(hidden, self._image_positions, self._image_rows, ops.constant(np.int64(0)))
        for layer in range(shape.num_layers):
            hidden = self._layer(layer, hidden)
        hidden = self._norm("final_norm", hidden)
        logits = self._logits(hidden) if has_head else hidden
        inputs = [self._input_ids, self._positions, self._sampled, *self._paging, self._longest]
        optional = (self._adapters, self._image_rows, self._image_positions, self._types)
        inputs += [given for given in optional if given is not None]
        return ov.Model([ops.result(logits, name="logits")], [*inputs, *self._caches])

    def _logits(self, hidden: Node) -> Node:
        (matrix,) = self._weights.matrices(("head" if "head" in self._weights else "embedding",))
        return _scaled(self._product(hidden, matrix), self._shape.logit_scale)

    def _layer(self, layer: int, hidden: Node) -> Node:
        name = f"layers.{layer}"
        added = self._attention(layer, self._norm(f"{name}.before_attention", hidden))
        if layer == self._shape.num_layers - 1:
            axis = ops.constant(np.int64(0))
            hidden, added = (ops.gather(value, self._sampled, axis) for value in (hidden, added))
            self._numbers = ops.gather(self._adapters, self._sampled, axis) if self._adapters is not None else None
        added = self._linear((f"{name}.o",), added)[0]
        hidden = self._add(hidden, self._norm(f"{name}.after_attention", added))
        added = self._mlp(name, self._norm(f"{name}.before_mlp", hidden))
        return self._add(hidden, self._norm(f"{name}.after_mlp", added))

    def _add(self, hidden: Node, added: Node) -> Node:
        return ops.add(hidden, _scaled(added, self._shape.residual_scale))

    def _attention(self, layer: int, hidden: Node) -> Node:
        """Return the results of all heads, [tokens, heads * size]."""
        shape, name = self._shape, f"layers.{layer}"
        queries, keys, values = self._linear(tuple(f"{name}.{kind}" for kind in MERGED[0]), hidden)
        queries = self._turned(layer, f"{name}.q_norm", queries, shape.num_heads)
        keys = self._turned(layer, f"{name}.k_norm", keys, shape.num_kv_heads)
        caches = [new_input(f"{kind}_cache.{layer}", None, [-1, -1, -1, -1]) for kind in ("key", "value")]
        self._caches += caches
        node = PagedAttention(
            [
                _node(given)
                for given in (
                    *(queries, keys, values, *caches, *self._paging, _number(shape.attention_scale)),
                    *(_number(shape.windows[layer], np.int32), _none(np.float32), self._longest),
                    *_UNUSED,
                    self._types if self._types is not None else _none(np.int32),
                    *_UNUSED_LAST,
                )
            ]
        )
        hints = node.get_rt_info()  # by which the library chooses the shapes of the caches
        for kind in "kv":
            hints[f"num_{kind}_heads"], hints[f"{kind}_head_size"] = shape.num_kv_heads, shape.head_size
        return node.output(0)

    def _turned(self, layer: int, norm: str, given: Node, num_heads: int) -> Node:
        """Return queries or keys with their norm and their position."""
        rope = self._shape.ropes[layer]
        if self._shape.head_norms == "all":
            given = self._norm(norm, given)
        if rope is None and self._shape.head_norms != "each":
            return _node(given)
        heads = ops.reshape(given, np.array([0, num_heads, 1, self._shape.head_size]), True)
        if self._shape.head_norms == "each":
            heads = self._norm(norm, heads)
        if rope is not None:
            heads = self._rotated(heads, rope)
        return ops.reshape(heads, np.array([0, num_heads * self._shape.head_size]), True)

    def _rotated(self, heads: Node, rope: Rope) -> Node:
        if rope not in self._angles:
            self._angles[rope] = self._angles_of(rope)
        cosines, sines = self._angles[rope]
        size, half = 2 * len(rope.frequencies), len(rope.frequencies)
        turned = heads if size == self._shape.head_size else _slice(heads, 0, size)
        opposite = ops.concat([ops.multiply(_slice(turned, half, size), _number(-1)), _slice(turned, 0, half)], -1)
        turned = ops.add(ops.multiply(turned, cosines), ops.multiply(opposite, sines))
        if size < self._shape.head_size:
            turned = ops.concat([turned, _slice(heads, size, self._shape.head_size)], -1)
        return turned

    def _angles_of(self, rope: Rope) -> tuple[Node, Node]:
        frequencies = np.array([*rope.frequencies, *rope.frequencies], np.float32).reshape(1, 1, 1, -1)
        positions = ops.reshape(ops.convert(self._positions, "f32"), np.array([-1, 1, 1, 1]), False)
        angles = ops.multiply(positions, ops.constant(frequencies))
        return _scaled(ops.cos(angles), rope.magnitude), _scaled(ops.sin(angles), rope.magnitude)

    def _mlp(self, name: str, hidden: Node) -> Node:
        gate, up = self._linear((f"{name}.gate", f"{name}.up"), hidden)
        active = ops.swish(gate) if self._shape.activation == "silu" else ops.gelu(gate, "tanh")
        return self._linear((f"{name}.down",), ops.multiply(active, up))[0]

    def _norm(self, name: str, given: Node) -> Node:
        """Return a root-mean-square norm over the last axis, or the input if the model has none of this name."""
        weight = self._weights.vector(name)
        if weight is None:
            return given
        mean = ops.reduce_mean(ops.power(given, _number(2)), np.array([-1]), True)
        inverse = ops.divide(_number(1), ops.sqrt(ops.add(mean, _number(self._shape.epsilon))))
        weight = weight + np.float32(self._shape.norm_offset)
        return ops.multiply(ops.multiply(given, inverse), ops.constant(weight))

    def _linear(self, names: tuple[str, ...], given: Node) -> list[Node]:
        """Return the results of linear layers with the same inputs."""
        results: list[Node] = []
        for matrix in self._weights.matrices(names):
            product = self._product(given, matrix)
            branch = self._branches.of(matrix.names, matrix.sizes, given, self._numbers)
            if branch is not None:
                product = ops.add(product, branch)
            if (bias := self._bias(matrix)) is not None:
                product = ops.add(product, ops.constant(bias))
            results += _split(product, matrix.sizes)
        return results

    def _bias(self, matrix: Matrix) -> npt.NDArray[np.float32] | None:
        biases = [self._weights.vector(f"{name}.bias") for name in matrix.names]
        if all(bias is None for bias in biases):
            return None
        parts = zip(biases, matrix.sizes, strict=True)
        return np.concatenate([np.zeros(size, np.float32) if bias is None else bias for bias, size in parts])

    def _product(self, given: Node, matrix: Matrix) -> Node:
        if matrix.form.has_sums:
            given = self._sums.behind(given, matrix.num_columns // GROUP)
        return ops.matmul(given, _weight(matrix), False, True)

    def _embedding(self, ids: Node) -> Node:
        (matrix,) = self._weights.matrices(("embedding",))
        axis = ops.constant(np.int64(0))
        rows = ops.convert(ops.gather(_constant(matrix), ids, axis), "f32")
        if matrix.form.bits >= 16:
            return rows
        scales = ops.gather(ops.constant(matrix.packed.scales, shared_memory=True), ids, axis)
        return ops.reshape(ops.multiply(rows, scales), np.array([0, matrix.num_columns]), True)


class _Sums:
    """The inputs of layers with the sums of their groups behind them. Layers with the same inputs share them."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Node] = {}
        self._matrices: dict[int, Node] = {}  # by number of groups; the library keeps a copy of each in its own form

    def behind(self, given: Node, count: int) -> Node:
        output = _node(given)
        key = (output.get_node().get_friendly_name(), output.get_index())
        if key not in self._made:
            summed = self._sums(given, count)
            self._made[key] = ops.concat([given, summed, summed], 1)
        return self._made[key]

    def _sums(self, given: Node, count: int) -> Node:
        """Return the sum of each group of inputs, with zeros behind them up to the next multiple of a group.

        They are a product with a matrix, because the library takes longer for its own reduction. Wide inputs are cut
        into parts with the same matrix: a matrix for 8,192 inputs would have 8 MB, which each step would read in each
        layer.
        """
        part = GROUP if count % GROUP == 0 else count
        if part == count:
            return self._product(given, part)
        parts = ops.reshape(given, np.array([0, count // part, part * GROUP]), True)
        return ops.reshape(self._product(parts, part), np.array([0, count]), True)

    def _product(self, given: Node, part: int) -> Node:
        if part not in self._matrices:
            matrix = np.zeros((-(-part // GROUP) * GROUP, part * GROUP), np.float32)
            inputs = np.arange(part * GROUP)
            matrix[inputs // GROUP, inputs] = 1
            self._matrices[part] = ops.constant(matrix)
        return ops.matmul(given, self._matrices[part], False, True)


def _weight(matrix: Matrix) -> Node:
    """Return the matrix as the arithmetic that the library's kernels recognise."""
    if matrix.form.bits >= 16:
        return ops.convert(_constant(matrix), "f32")
    scales = ops.constant(matrix.packed.scales, shared_memory=True)
    groups = ops.multiply(ops.convert(_constant(matrix), "f32"), scales)
    rows, num_groups, size = groups.get_output_shape(0)
    return ops.reshape(groups, np.array([rows, num_groups * size]), False)


def _constant(matrix: Matrix) -> Node:
    codes = matrix.packed.codes
    if matrix.form.bits != 4:
        return ops.constant(codes, shared_memory=True)
    shape = ov.Shape([*codes.shape[:-1], 2 * codes.shape[-1]])
    return ops.constant(ov.Tensor(codes, shape, ov.Type.i4), shared_memory=True)


def _split(product: Node, sizes: Sequence[int]) -> list[Node]:
    if len(sizes) == 1:
        return [_node(product)]
    split = ops.variadic_split(product, np.int64(-1), np.array(sizes, np.int64))
    return [split.output(index) for index in range(len(sizes))]


def _slice(given: Node, first: int, last: int) -> Node:
    return ops.slice(given, np.array([first]), np.array([last]), np.array([1]), np.array([-1]))


def _scaled(given: Node, scale: float) -> Node:
    return given if scale == 1 else ops.multiply(given, _number(scale))


def _node(given: Node) -> Node:
    """Return an output of a node."""
    return given.output(0) if hasattr(given, "output") else given


def _number(value: float, kind: Any = np.float32) -> Node:  # Any: numpy's scalar types
    return ops.constant(kind(value))


def _none(kind: Any) -> Node:
    return ops.constant(np.empty(0, kind))


def new_input(name: str, kind: Any, shape: list[int]) -> Node:
    """Return an input. Without a type, the library chooses one."""
    node = Parameter(ov.Type.dynamic if kind is None else ov.Type(kind), ov.PartialShape(shape))
    node.set_friendly_name(name)
    node.output(0).get_tensor().set_names({name})
    return node


IMAGE_INPUTS = ("image_rows", "image_positions", "token_types")
# What paged attention can also do, and is not used here: scores, rotation of moved blocks, sparse attention, sinks,
# removal of old tokens, and blocks of a query.
_UNUSED = (
    *(_none(np.int32), _none(np.int32), _none(np.int32), _none(np.float32), _none(np.float32)),
    *(_number(0, np.int32), _number(0, np.int32), ops.constant(np.empty((0, 0, 0, 0), np.float32))),
    *(_number(0, np.int32), _none(np.int32), _none(np.int32), _none(np.int32)),
)
_UNUSED_LAST = (_none(np.uint8), _none(np.int32))
