"""Exports models of transformers as optimum-intel does: a graph with its KV cache as state."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino._offline_transformations import apply_make_stateful_transformation

__all__ = ["export"]


class _Past:
    """A cache of transformers whose tensors are inputs and outputs of the graph."""

    is_compileable = False

    def __init__(self, tensors: Sequence[Any]) -> None:  # Any: torch's tensors
        self.tensors = list(tensors)

    def update(self, keys: Any, values: Any, layer: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        import torch

        at = 2 * layer
        self.tensors[at] = torch.cat([self.tensors[at], keys], -2)
        self.tensors[at + 1] = torch.cat([self.tensors[at + 1], values], -2)
        return self.tensors[at], self.tensors[at + 1]

    def get_seq_length(self, _: int = 0) -> int:
        return int(self.tensors[0].shape[-2])


def export(model: Any, path: Path, *, has_cache: bool = True) -> Path:  # Any: transformers' model
    """Write a directory with the graph. Without a cache, the graph has it as inputs and outputs."""
    config = model.config
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = [f"{layer}.{kind}" for layer in range(config.num_hidden_layers) for kind in ("key", "value")]
    graph = _graph(model, len(kinds), num_heads, size)
    past, present = [f"past_key_values.{kind}" for kind in kinds], [f"present.{kind}" for kind in kinds]
    shapes = {"input_ids": [-1, -1], "attention_mask": [-1, -1], "position_ids": [-1, -1], "beam_idx": [-1]}
    shapes |= {name: [-1, num_heads, -1, size] for name in past}
    for port, (name, shape) in zip(graph.inputs, shapes.items(), strict=True):
        node = port.get_node()
        port.get_tensor().set_names({name})
        node.set_friendly_name(name)
        node.set_partial_shape(ov.PartialShape(shape))
        if name == "beam_idx":
            node.set_element_type(ov.Type.i32)
    for port, name in zip(graph.outputs, ["logits", *present], strict=True):
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()
    if has_cache:
        apply_make_stateful_transformation(graph, dict(zip(past, present, strict=True)))
        _begin_empty(graph, [num_heads, 0, size])
    path.mkdir(exist_ok=True)
    ov.save_model(graph, path / "openvino_model.xml", compress_to_fp16=False)
    return path


def _graph(model: Any, num_tensors: int, num_heads: int, size: int) -> Any:
    import torch

    family = type(model)

    class Exported(family):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, beam_idx: Any, *tensors: Any) -> Any:
            past = _Past([tensor.index_select(0, beam_idx) for tensor in tensors])
            is_seen = torch.arange(attention_mask.shape[1])[None, None, None] <= position_ids[:, None, :, None]
            is_seen = is_seen & attention_mask[:, None, None].bool()
            found = super().forward(
                input_ids=input_ids,
                attention_mask=torch.where(is_seen, 0.0, torch.finfo(torch.float32).min),
                position_ids=position_ids,
                past_key_values=past,
                use_cache=True,
            )
            return (found.logits, *past.tensors)

    numbers = torch.arange(8)[None]
    tensors = [torch.zeros(1, num_heads, 5, size)] * num_tensors
    example = (numbers[:, :3], torch.ones_like(numbers), numbers[:, 5:], torch.zeros(1, dtype=torch.long), *tensors)
    model.__class__ = Exported
    try:
        with _attention(model, "sdpa"), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ov.convert_model(model, example_input=example)
    finally:
        model.__class__ = family


@contextmanager
def _attention(model: Any, kind: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.config._attn_implementation = kind
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _begin_empty(graph: Any, shape: list[int]) -> None:
    """Give each state its first value: no tokens, for as many sequences as there are inputs."""
    sizes = ops.shape_of(graph.input("input_ids"), "i64")
    count = ops.gather(sizes, ops.constant(np.array([0])), ops.constant(np.int64(0)))
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            whole = ops.concat([count, ops.constant(np.array(shape, np.int64))], 0)
            node.set_arguments([ops.broadcast(ops.constant(np.float32(0)), whole).output(0)])
    graph.validate_nodes_and_infer_types()
