"""A LoRA adapter for vLLM: held against the checkpoint first, and then written out anew for it.

The library (0.32) copies weights of another shape into a corner of its own, without an error, and knows no scale. What
it is given here has been read and checked by us, with the scale in it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from safetensors.numpy import save_file
from vllm.lora.request import LoRARequest

from tailrace.engines.adapters import Adapter
from tailrace.models.safetensors import read_head

__all__ = ["RANKS", "write_adapter"]

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that the library has room for


def write_adapter(adapter: Adapter, checkpoint: Path, target: Path) -> LoRARequest:
    """Write it into the directory `target`, as the library reads it. Raises: ModelError for one of another model."""
    if adapter.rank > RANKS[-1]:
        raise adapter.refusal(f"its rank is {adapter.rank}, and {RANKS[-1]} is the most that vLLM takes")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in checkpoint.glob("*.safetensors"):
        shapes |= {name: tuple(tensor.shape) for name, tensor in read_head(file)[0].items()}
    quantised = {name.removesuffix(".qweight") for name in shapes if name.endswith(".qweight")}
    tensors = {}
    for name, added in adapter.layers.items():
        if name not in quantised:  # of those the shape depends on the method
            adapter.check(name, shapes.get(f"{name}.weight"))
        tensors[f"base_model.model.{name}.lora_A.weight"] = added.a
        tensors[f"base_model.model.{name}.lora_B.weight"] = added.b
    save_file(tensors, target / "adapter_model.safetensors")
    last = sorted({name.rpartition(".")[2] for name in adapter.layers})
    config = {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.rank, "target_modules": last}
    (target / "adapter_config.json").write_bytes(msgspec.json.encode(config))
    return LoRARequest("adapter", 1, str(target))
