"""Writes a LoRA adapter into an OpenVINO model: each layer gets a low-rank branch, whose result is added.

The library's own adapters (2026.4.1) find layers by optimum-intel's names. If no name matches, as in models that were
made from a GGUF file, they have no effect, with at most a message on stdout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openvino as ov
from openvino import opset13 as ops

from tailrace.engines.adapters import Adapter
from tailrace.engines.openvino.graph import inputs_of, num_inputs_of

__all__ = ["linear_layers", "write_adapted"]

# The linear layers of a block, in the order in which the library numbers them when it reads a GGUF file.
_IN_A_LAYER = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_EXPORTED = re.compile(r"__module\.(?P<layer>[\w.]+)/")
_NUMBERED = re.compile(r"MatMul_(?P<number>\d+)")


def write_adapted(directory: Path, adapter: Adapter, target: Path) -> None:
    """Write a directory's model with an adapter into another directory, and link its other files there.

    Raises: ModelError if the adapter does not fit the model; the library's RuntimeError.
    """
    model = ov.Core().read_model(directory / "openvino_model.xml")
    layers = linear_layers(model)
    for name, added in adapter.layers.items():
        node = layers.get(name)
        adapter.check(name, None if node is None else _shape(node))
        assert node is not None
        narrow = ops.matmul(inputs_of(node), ops.constant(added.a), False, True)
        branch = ops.matmul(narrow, ops.constant(added.b), False, True)
        readers = list(node.output(0).get_target_inputs())
        together = ops.add(node.output(0), branch)
        for reader in readers:
            reader.replace_source_output(together.output(0))
    model.validate_nodes_and_infer_types()
    ov.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)
    for file in directory.iterdir():
        if not (target / file.name).exists():
            (target / file.name).symlink_to(file.resolve())


def _shape(layer: Any) -> tuple[int, int]:  # Any: the library's nodes
    """Return the numbers of outputs and of inputs of a linear layer."""
    return layer.input_value(1).get_shape()[0], num_inputs_of(layer)


def linear_layers(model: Any) -> dict[str, Any]:  # Any: the library's nodes
    """Return the linear layers by their Hugging Face names."""
    linear = [node for node in model.get_ordered_ops() if _is_linear(node)]
    exported = {match["layer"]: node for node in linear if (match := _EXPORTED.match(node.get_friendly_name()))}
    return exported or dict(_numbered(linear))


def _is_linear(node: Any) -> bool:
    if node.get_type_name() != "MatMul" or not node.get_attributes()["transpose_b"]:
        return False
    weight = node.input_value(1)
    return bool(weight.get_partial_shape().is_static and len(weight.get_shape()) == 2)


def _numbered(linear: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the layers of a GGUF file, which have no names. Yields nothing unless there are seven per block and one
    more."""
    numbers = {int(m["number"]): node for node in linear if (m := _NUMBERED.fullmatch(node.get_friendly_name()))}
    in_order = [numbers[number] for number in sorted(numbers)]
    if len(in_order) != len(linear) or len(linear) % len(_IN_A_LAYER) != 1:
        return
    for position, node in enumerate(in_order[:-1]):
        index, kind = divmod(position, len(_IN_A_LAYER))
        yield f"model.layers.{index}.{_IN_A_LAYER[kind]}", node
