"""LoRA adapters in the graph of a decoder: each layer that one of them changes gets a low-rank branch.

All adapters are in one branch. The narrow results of all of them lie side by side, and each row keeps those of its own
adapter. So rows of different adapters run in one step, and a row without one adds zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from openvino import opset13 as ops

from tailrace_kit.adapters import Adapter, LowRank, owned_columns

__all__ = ["Branches", "split_fused"]

_Node: TypeAlias = Any  # the library's nodes
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # of Phi-3


def split_fused(adapter: Adapter, shapes: Mapping[str, tuple[int, int]]) -> Adapter:
    """Return the adapter with the changes of layers that are one in Phi-3, and several here. `shapes`: outputs and
    inputs by the names in adapters. What does not fit stays as it is."""
    layers = {}
    for name, low in adapter.layers.items():
        prefix, _, last = name.rpartition(".")
        parts = [f"{prefix}.{part}" for part in _FUSED.get(last, ())]
        ends = np.cumsum([shapes.get(part, (0, 0))[0] for part in parts])
        if not parts or ends[-1] != len(low.b):
            layers[name] = low
            continue
        for part, rows in zip(parts, np.split(low.b, ends[:-1]), strict=True):
            layers[part] = LowRank(low.a, rows)
    return replace(adapter, layers=layers)


@dataclass(frozen=True, slots=True)
class Branches:
    """The branches of all adapters, which are numbered from 1. `names` gives the name of a layer in adapters by its
    name here."""

    adapters: Sequence[Adapter] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    _shared: dict[tuple[tuple[int, ...], bytes, str], _Node] = field(default_factory=dict, init=False)

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """`shapes`: outputs and inputs of the layers, by their names here. Raises: ModelError if an adapter does not
        fit the model."""
        own = {long: short for short, long in self.names.items()}
        for adapter in self.adapters:
            for name in adapter.layers:
                adapter.check(name, shapes.get(own.get(name, "")))

    def of(self, names: Sequence[str], sizes: Sequence[int], given: _Node, numbers: _Node) -> _Node | None:
        """Return what the adapters add to the results of layers with the same inputs, which lie side by side. None if
        none of them is changed.

        `sizes` are the numbers of outputs; `numbers` the adapters of the rows, [rows], 0 for none.
        """
        parts = list(self._parts(names, sizes))
        if not parts:
            return None
        rank = sum(low.a.shape[0] for _, _, low in parts)
        wide = np.zeros((sum(sizes), rank), np.float32)
        own = owned_columns([(number, low) for number, _, low in parts], len(self.adapters))
        at = 0
        for _, first, low in parts:
            columns = slice(at, at + low.a.shape[0])
            wide[first : first + low.b.shape[0], columns] = low.b
            at = columns.stop
        narrow = ops.matmul(given, ops.constant(np.concatenate([low.a for _, _, low in parts])), False, True)
        num_axes = narrow.get_output_partial_shape(0).rank.get_length()
        kept = ops.multiply(narrow, self._factors(own, numbers, num_axes))
        return ops.matmul(kept, ops.constant(wide), False, True)

    def _factors(self, own: npt.NDArray[np.float32], numbers: _Node, num_axes: int) -> _Node:
        """Return the rows of `own` for the rows of the step. Layers of the same kind share them."""
        key = (own.shape, own.tobytes(), numbers.get_friendly_name())
        if key not in self._shared:
            factors: _Node = ops.gather(ops.constant(own), numbers, ops.constant(np.int64(0)))
            if num_axes == 3:  # [rows, 1, width], as in an export
                factors = ops.unsqueeze(factors, ops.constant(np.int64(1)))
            self._shared[key] = factors
        return self._shared[key]

    def _parts(self, names: Sequence[str], sizes: Sequence[int]) -> list[tuple[int, int, LowRank]]:
        """Return the number of the adapter, the first row and the change of each layer that is changed."""
        firsts = np.cumsum([0, *sizes])
        return [
            (number, int(first), adapter.layers[self.names[name]])
            for number, adapter in enumerate(self.adapters, 1)
            for name, first in zip(names, firsts, strict=False)
            if self.names.get(name) in adapter.layers
        ]
