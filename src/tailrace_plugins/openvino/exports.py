"""Brings the model of an OpenVINO export into the form of `decoder.py`: paged attention, and logits of some tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from tailrace.errors import ModelError
from tailrace_kit.adapters import Adapter
from tailrace_plugins.openvino.decoder import new_input
from tailrace_plugins.openvino.openvino_adapters import Branches
from tailrace_plugins.openvino.openvino_names import to_paged_attention

__all__ = ["read_export"]

_EXPORTED = re.compile(r"__module\.(?P<layer>[\w.]+)/")
_PASSES = ("Convert", "Multiply", "Divide", "Tanh", "Add", "Reshape", "Squeeze", "Unsqueeze")  # after the last product


def read_export(directory: Path, adapters: Sequence[Adapter] = ()) -> Any:  # Any: the library's model
    """Read a model, and put adapters into it. Raises: ModelError if it is no decoder with a cache, or if an adapter
    does not fit; the library's RuntimeError."""
    model = ov.Core().read_model(directory / "openvino_model.xml")
    if not model.get_sinks():
        raise ModelError(
            f"{directory.name} was exported without its cache. Export it again: optimum-cli export openvino --task "
            "text-generation-with-past."
        )
    try:
        to_paged_attention(model)
    except RuntimeError as error:
        raise ModelError(
            f"{directory.name} cannot be used: its attention is not that of a decoder as optimum-intel exports it."
        ) from error
    sampled = new_input("sampled", np.int64, [-1])
    product = model.outputs[0].get_node().input_value(0).get_node()
    while product.get_type_name() in _PASSES:
        product = product.input_value(0).get_node()
    if product.get_type_name() != "MatMul":
        raise ModelError(f"{directory.name} cannot be used: its last layer is not a product, so it is no decoder.")
    hidden = product.input_value(0)  # [tokens, 1, width]
    product.input(0).replace_source_output(ops.gather(hidden, sampled, ops.constant(np.int64(0))).output(0))
    model.add_parameters([sampled])
    if adapters:
        _put(adapters, model)
    model.validate_nodes_and_infer_types()
    output = model.outputs[0]
    rows = ops.reshape(output.get_node().input_value(0), np.array([-1, output.partial_shape[-1].get_length()]), False)
    result = ops.result(rows)
    result.output(0).get_tensor().set_names({"logits"})
    model.remove_result(output.get_node())
    model.add_results([result])
    return model


class _Linear(NamedTuple):
    """A linear layer of an export."""

    name: str
    product: Any  # Any: the library's node

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        outputs, inputs = self.product.input_value(1).get_shape()
        return outputs, inputs


def _put(adapters: Sequence[Adapter], model: Any) -> None:
    layers = {layer.name: layer for layer in _linear_layers(model)}
    branches = Branches(adapters, {name: name for name in layers})
    branches.check({name: layer.shape for name, layer in layers.items()})
    numbers = new_input("adapters", np.int64, [-1])
    for layer in layers.values():
        branch = branches.of((layer.name,), (layer.shape[0],), layer.product.input_value(0), numbers)
        if branch is None:
            continue
        readers = list(layer.product.output(0).get_target_inputs())
        together = ops.add(layer.product, branch)
        for reader in readers:
            reader.replace_source_output(together.output(0))
    model.add_parameters([numbers])


def _linear_layers(model: Any) -> Iterator[_Linear]:
    """Yield the layers that have the names of optimum-intel's exports."""
    for node in model.get_ordered_ops():
        named = _EXPORTED.match(node.get_friendly_name())
        if named is None or node.get_type_name() != "MatMul" or not node.get_attributes()["transpose_b"]:
            continue
        weight = node.input_value(1).get_partial_shape()
        if weight.is_static and weight.rank.get_length() == 2:
            yield _Linear(named["layer"], node)
