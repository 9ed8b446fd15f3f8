"""Writes LoRA adapters in PEFT's format with random numbers, and runs engines with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Delta, Sequence
from tailrace.types import Sampling

__all__ = ["RANK", "answer", "random_pairs", "save", "save_tensors"]

RANK = 4

Pairs = dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]


def random_pairs(shapes: Mapping[str, tuple[int, int]], strength: float) -> Pairs:
    """Return random lora_A and lora_B of each layer. With strength 1, their output is about as large as their input."""
    numbers = np.random.default_rng(5)

    def normal(rows: int, columns: int, scale: float) -> NDArray[np.float32]:
        return (numbers.standard_normal((rows, columns)) * scale).astype(np.float32)

    return {
        name: (normal(RANK, width, width**-0.5), normal(height, RANK, strength * RANK**-0.5))
        for name, (height, width) in shapes.items()
    }


def save(path: Path, pairs: Pairs, **config: Any) -> Path:  # Any: whatever a config file may hold
    """Write an adapter's directory. `lora_alpha` is the rank unless `config` says otherwise."""
    tensors = {}
    for name, (a, b) in pairs.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    path.mkdir(exist_ok=True)
    save_tensors(path / "adapter_model.safetensors", tensors)
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["any"]}
    (path / "adapter_config.json").write_text(json.dumps(told | config))
    return path


def save_tensors(file: Path, tensors: Mapping[str, NDArray[Any]], dtype: str = "") -> None:  # Any: of any dtype
    """Write tensors. `dtype` names types that numpy does not have."""
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    written = b""
    for name, tensor in tensors.items():
        kind = dtype or {"f4": "F32", "f2": "F16", "i4": "I32"}[tensor.dtype.str[1:]]
        raw = tensor.tobytes()
        head[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": (len(written), len(written) + len(raw))}
        written += raw
    text = json.dumps(head).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + written)


def answer(spec: EngineSpec) -> list[int]:
    """Return the twelve most likely tokens, one after the other."""
    engine = load_engine(spec)
    engine.submit(Sequence(1, ((5, 6, 7),), Sampling(temperature=0.0, seed=0, max_tokens=12, ignore_eos=True)))
    deltas: list[Delta] = []
    while not deltas or deltas[-1].finish_reason is None:
        deltas += engine.step()
    engine.close()
    return [token_id for delta in deltas for token_id in delta.token_ids]
