"""Merges a LoRA adapter into the weights of a transformers model."""

from __future__ import annotations

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from tailrace.engines.adapters import Adapter

__all__ = ["merge"]


@torch.no_grad()
def merge(model: Any, adapter: Adapter) -> None:  # Any: the library's model, whichever it is
    """Add an adapter to a model's weights. Raises: ModelError if the adapter does not fit the model."""
    for name, added in adapter.layers.items():
        layer = _linear(model, name)
        is_turned = isinstance(layer, Conv1D)  # GPT-2 stores weights transposed
        weight = None if layer is None else layer.weight.T if is_turned else layer.weight
        adapter.check(name, None if weight is None else tuple(weight.shape))
        assert weight is not None
        if not weight.is_floating_point():
            raise adapter.refusal(f"the model's layer {name} is quantised, so the adapter cannot be added")
        product = torch.from_numpy(added.b @ added.a)
        summed = (weight.float() + product.to(weight.device)).to(weight.dtype)
        # A new tensor, because the last layer may share its weight with the embedding.
        layer.weight = torch.nn.Parameter(summed.T.contiguous() if is_turned else summed, requires_grad=False)


def _linear(model: Any, name: str) -> Any:  # Any: as above
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        return None
    return layer if isinstance(layer, torch.nn.Linear | Conv1D) else None
