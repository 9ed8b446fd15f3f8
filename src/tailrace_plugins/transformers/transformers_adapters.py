"""LoRA adapters in a transformers model: merged into its weights, or beside them if requests choose one by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from tailrace_kit.adapters import Adapter, numbers_of, owned_columns

__all__ = ["RowAdapters", "merge"]


@torch.no_grad()
def merge(model: Any, adapter: Adapter) -> None:  # Any: the library's model, whichever it is
    """Add an adapter to a model's weights. Raises: ModelError if the adapter does not fit the model."""
    for name, added in adapter.layers.items():
        layer, weight = _checked(model, name, adapter)
        if not weight.is_floating_point():
            raise adapter.refusal(f"the model's layer {name} is quantised, so the adapter cannot be added")
        product = torch.from_numpy(added.b @ added.a)
        summed = (weight.float() + product.to(weight.device)).to(weight.dtype)
        is_turned = isinstance(layer, Conv1D)
        # A new tensor, because the last layer may share its weight with the embedding.
        layer.weight = torch.nn.Parameter(summed.T.contiguous() if is_turned else summed, requires_grad=False)


class RowAdapters:
    """Low-rank branches beside the layers of a model. The narrow results of all adapters lie side by side, and each
    token keeps those of its own adapter."""

    def __init__(self, model: Any, adapters: Mapping[str, Adapter]) -> None:  # Any: as above
        """Raises: ModelError if an adapter does not fit the model."""
        self._numbers = numbers_of(adapters)
        self._tokens: list[int] = []  # the adapters of the step's tokens
        for name in sorted({name for adapter in adapters.values() for name in adapter.layers}):
            self._put(model, name, list(adapters.values()))

    def set(self, pieces: Sequence[tuple[str, int]]) -> None:
        """Say what the next step computes: the adapter and the number of tokens of each sequence, in order."""
        self._tokens = [self._numbers[name] for name, count in pieces for _ in range(count)]

    def _put(self, model: Any, name: str, adapters: Sequence[Adapter]) -> None:  # Any: as above
        parts = [(number, one.layers[name]) for number, one in enumerate(adapters, 1) if name in one.layers]
        for number, _ in parts:
            layer, weight = _checked(model, name, adapters[number - 1])
            if name == "lm_head":  # which does not get all tokens
                raise adapters[number - 1].refusal("it changes lm_head, which works only without a name")
        dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
        narrow = torch.cat([torch.from_numpy(low.a) for _, low in parts]).to(weight.device, dtype)
        wide = torch.cat([torch.from_numpy(low.b) for _, low in parts], 1).to(weight.device, dtype)
        own = torch.from_numpy(owned_columns(parts, len(adapters))).to(weight.device, dtype)
        layer.register_forward_hook(partial(self._add, narrow, wide, own))

    def _add(
        self, narrow: torch.Tensor, wide: torch.Tensor, own: torch.Tensor, layer: Any, given: Any, output: torch.Tensor
    ) -> torch.Tensor:  # Any: the library's module, and its arguments
        """Process (1, tokens, width). The last tokens may be padding."""
        (hidden,) = given
        tokens = torch.tensor(self._tokens + [0] * (hidden.shape[1] - len(self._tokens)), device=hidden.device)
        added: torch.Tensor = (hidden.to(narrow.dtype) @ narrow.T) * own[tokens] @ wide.T
        return output + added.to(output.dtype)


def _checked(model: Any, name: str, adapter: Adapter) -> tuple[Any, torch.Tensor]:  # Any: as above
    """Return a linear layer and its weight, (outputs, inputs). Raises: ModelError."""
    layer = _linear(model, name)
    # GPT-2 stores weights transposed.
    weight = None if layer is None else layer.weight.T if isinstance(layer, Conv1D) else layer.weight
    adapter.check(name, None if weight is None else tuple(weight.shape))
    assert weight is not None
    return layer, weight


def _linear(model: Any, name: str) -> Any:  # Any: as above
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        return None
    return layer if isinstance(layer, torch.nn.Linear | Conv1D) else None
