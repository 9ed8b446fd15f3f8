"""Merges linear layers with the same inputs into one layer, such as those of queries, keys and values.

A step of a small model is mostly the library's work for each node. With SmolLM2-135M a step takes a tenth less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from tailrace.engines.openvino.graph import has_weight, inputs_of, num_inputs_of, weight_node

__all__ = ["Layer", "linear_layers", "merge_layers"]

_BETWEEN = "+"  # the name of a merged layer has the names of its parts


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer, or a part of a merged one."""

    name: str  # the library's
    node: Any  # the `MatMul`; Any: the library's nodes
    output: Any
    first: int  # row of the node's weight
    num_outputs: int

    @property
    def inputs(self) -> Any:  # Any: as above
        return inputs_of(self.node)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and of inputs."""
        return self.num_outputs, num_inputs_of(self.node)


class _Weight(NamedTuple):
    """The constants of a weight that `graph.py` made."""

    codes: Any  # Any: the library's nodes
    scales: Any


def linear_layers(model: Any) -> Iterator[Layer]:  # Any: the library's model
    """Yield the linear layers, in the order of the graph."""
    for node in model.get_ordered_ops():
        if not _is_linear(node):
            continue
        names = node.get_friendly_name().split(_BETWEEN)
        if len(names) == 1:
            yield Layer(names[0], node, node.output(0), 0, node.input_value(1).get_shape()[0])
            continue
        (split,) = (reader.get_node() for reader in node.output(0).get_target_inputs())
        first = 0
        for place, name in enumerate(names):
            size = split.output(place).get_partial_shape()[-1].get_length()
            yield Layer(name, node, split.output(place), first, size)
            first += size


def merge_layers(model: Any) -> None:  # Any: the library's model
    """Merge the layers whose weights have the same form. Memory: the weights of the largest merged layer."""
    groups: dict[object, list[tuple[Any, _Weight]]] = {}  # Any: a layer
    for node in model.get_ordered_ops():
        if _is_linear(node) and (weight := _weight_of(node)) is not None:
            given = node.input_value(0)
            form = (str(weight.codes.get_element_type()), tuple(weight.codes.get_shape())[1:])
            groups.setdefault((given.get_node().get_friendly_name(), given.get_index(), *form), []).append(
                (node, weight)
            )
    while groups:
        _, layers = groups.popitem()
        if len(layers) > 1:
            _merge(layers)
    model.validate_nodes_and_infer_types()


def _is_linear(node: Any) -> bool:
    if node.get_type_name() != "MatMul" or not node.get_attributes()["transpose_b"] or not has_weight(node):
        return False
    weight = node.input_value(1)
    return bool(weight.get_partial_shape().is_static and len(weight.get_shape()) == 2)


def _weight_of(layer: Any) -> _Weight | None:
    """Return None for a weight that is not made of codes and scales."""
    shaped = layer.input_value(1).get_node()
    if shaped.get_type_name() != "Reshape":
        return None
    node = shaped.input_value(0).get_node()
    if node.get_type_name() != "Multiply":
        return None
    numbers, scales = (value.get_node() for value in node.input_values())
    return _Weight(numbers.input_value(0).get_node(), scales)


def _merge(layers: list[tuple[Any, _Weight]]) -> None:
    nodes, weights = zip(*layers, strict=True)
    weight = weight_node(*(_together(constants) for constants in zip(*weights, strict=True)))
    sizes = [node.input_value(1).get_shape()[0] for node in nodes]
    merged = ops.matmul(nodes[0].input_value(0), weight, False, True)
    merged.set_friendly_name(_BETWEEN.join(node.get_friendly_name() for node in nodes))
    split = ops.variadic_split(merged, np.int64(-1), np.array(sizes, np.int64))
    for place, node in enumerate(nodes):
        for reader in list(node.output(0).get_target_inputs()):
            reader.replace_source_output(split.output(place))


def _together(constants: tuple[Any, ...]) -> Any:
    """Return a constant with the rows of all of them. A row has whole bytes."""
    _, *row = constants[0].get_shape()
    rows = sum(constant.get_shape()[0] for constant in constants)
    tensor = ov.Tensor(constants[0].get_element_type(), ov.Shape([rows, *row]))
    tensor.data.reshape(-1)[:] = np.concatenate([constant.data.reshape(-1) for constant in constants])
    return ops.constant(tensor)
