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
from tailrace.engines.openvino.merging import Layer, linear_layers

__all__ = ["named_layers", "write_adapted"]

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
    layers = named_layers(model)
    for name, added in adapter.layers.items():
        layer = layers.get(name)
        adapter.check(name, None if layer is None else layer.shape)
        assert layer is not None
        narrow = ops.matmul(layer.inputs, ops.constant(added.a), False, True)
        branch = ops.matmul(narrow, ops.constant(added.b), False, True)
        readers = list(layer.output.get_target_inputs())
        together = ops.add(layer.output, branch)
        for reader in readers:
            reader.replace_source_output(together.output(0))
    model.validate_nodes_and_infer_types()
    ov.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)
    for file in directory.iterdir():
        if not (target / file.name).exists():
            (target / file.name).symlink_to(file.resolve())


def named_layers(model: Any) -> dict[str, Layer]:  # Any: the library's model
    """Return the linear layers by their Hugging Face names."""
    linear = list(linear_layers(model))
    exported = {match["layer"]: layer for layer in linear if (match := _EXPORTED.match(layer.name))}
    return exported or dict(_numbered(linear))


def _numbered(linear: list[Layer]) -> Iterator[tuple[str, Layer]]:
    """Yield the layers of a GGUF file, which have no names. Yields nothing unless there are seven per block and one
    more."""
    numbers = {int(match["number"]): layer for layer in linear if (match := _NUMBERED.fullmatch(layer.name))}
    in_order = [numbers[number] for number in sorted(numbers)]
    if len(in_order) != len(linear) or len(linear) % len(_IN_A_LAYER) != 1:
        return
    for position, layer in enumerate(in_order[:-1]):
        index, kind = divmod(position, len(_IN_A_LAYER))
        yield f"model.layers.{index}.{_IN_A_LAYER[kind]}", layer
