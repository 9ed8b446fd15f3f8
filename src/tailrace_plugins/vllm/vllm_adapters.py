"""Checks a LoRA adapter against the checkpoint, and writes it for vLLM.

The library (0.32) accepts weights of a wrong shape without an error, and has no scale. So tailrace checks the adapter
and applies the scale first.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from safetensors import safe_open
from safetensors.numpy import save_file
from vllm.lora.request import LoRARequest

from tailrace_kit.adapters import Adapter

__all__ = ["RANKS", "write_adapter"]

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that the library supports


def write_adapter(adapter: Adapter, number: int, checkpoint: Path, folder: Path) -> LoRARequest:
    """Write an adapter into a new directory in `folder`. `number` is its own, from 1. Raises: ModelError if it does not
    fit the model."""
    if adapter.rank > RANKS[-1]:
        raise adapter.refusal(f"its rank is {adapter.rank}, but vLLM supports at most {RANKS[-1]}")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "numpy") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118  # no dict
    quantised = {name.removesuffix(".qweight") for name in shapes if name.endswith(".qweight")}
    tensors = {}
    for name, added in adapter.layers.items():
        if name not in quantised:  # their stored shape depends on the quantisation
            adapter.check(name, shapes.get(f"{name}.weight"))
        tensors[f"base_model.model.{name}.lora_A.weight"] = added.a
        tensors[f"base_model.model.{name}.lora_B.weight"] = added.b
    target = folder / str(number)
    target.mkdir()
    save_file(tensors, target / "adapter_model.safetensors")
    last = sorted({name.rpartition(".")[2] for name in adapter.layers})
    config = {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.rank, "target_modules": last}
    (target / "adapter_config.json").write_bytes(msgspec.json.encode(config))
    return LoRARequest(f"adapter {number}", number, str(target))
