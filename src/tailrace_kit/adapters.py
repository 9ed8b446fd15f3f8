"""Reads a LoRA adapter in PEFT's format: `adapter_model.safetensors` and `adapter_config.json` in one directory.

Not read by the engines' libraries: some ignore what they do not know, others would load pickles. Anything except a
plain LoRA of linear layers is refused with the file's name and the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.engines import EngineSpec
from tailrace.errors import ModelError
from tailrace.models.safetensors import Tensor, adapter_file, read_head

__all__ = ["Adapter", "LowRank", "numbers_of", "owned_columns", "read_adapter", "read_adapters"]

_PREFIX = "base_model.model."
_CHANGES_THE_MODEL = ("corda", "loftq", "olora", "pissa")  # initialisations that also change the base model's weights
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # numpy has no bfloat16: its bits


class _Config(msgspec.Struct):
    r: int
    lora_alpha: float
    peft_type: str = ""
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    use_qalora: bool = False
    init_lora_weights: bool | str = True
    alora_invocation_tokens: list[int] | None = None
    alpha_pattern: dict[str, float] = {}
    rank_pattern: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of one layer's weight: `b @ a`, of shapes (out, rank) and (rank, in). The scale is applied already."""

    a: NDArray[np.float32]
    b: NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, int]:
        return self.b.shape[0], self.a.shape[1]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter. `layers` are all of one rank, by their names in the Hugging Face model:
    model.layers.0.self_attn.q_proj."""

    file: Path
    rank: int
    layers: dict[str, LowRank]

    def check(self, name: str, shape: tuple[int, ...] | None) -> None:
        """Check a layer against the shape of the model's layer, None if the model has no such layer. Raises:
        ModelError."""
        if shape is None:
            raise self.refusal(f"the model has no linear layer {name}")
        if shape != (mine := self.layers[name].shape):
            raise self.refusal(
                f"its layer {name} has the shape {mine[0]} x {mine[1]}, but the model's has {shape[0]} x {shape[1]}"
            )

    def refusal(self, reason: str) -> ModelError:
        return _refusal(self.file, reason)


def read_adapters(spec: EngineSpec) -> dict[str, Adapter]:
    """Read the adapters of a model, by their names. Raises: ModelError."""
    return {name: read_adapter(path, spec.adapter_scale) for name, path in spec.adapters.items()}


def numbers_of(names: Iterable[str]) -> dict[str, int]:
    """Return the numbers of adapters by their names, from 1. A sequence without one has the name "" and the number 0,
    unless an adapter has this name."""
    return {"": 0} | {name: number for number, name in enumerate(names, 1)}


def owned_columns(parts: Sequence[tuple[int, LowRank]], num_adapters: int) -> NDArray[np.float32]:
    """Return which columns each adapter keeps of the narrow results of all `parts`, which lie side by side: 1 or 0,
    (1 + adapters, columns). A part has the number of its adapter."""
    owners = np.repeat([number for number, _ in parts], [len(low.a) for _, low in parts])
    own: NDArray[np.float32] = (np.arange(num_adapters + 1)[:, None] == owners).astype(np.float32)
    return own


def read_adapter(path: str, scale: float) -> Adapter:
    """Read the adapter of a directory or a file. Raises: ModelError."""
    file = adapter_file(path)
    if not file.is_file():
        raise _refusal(file, "there is no such file or directory")
    if file.suffix != ".safetensors":
        raise _refusal(file, "it is not a .safetensors file. Pickles are not read, because they can run code")
    config = _config(file)
    tensors, start = read_head(file)
    scale *= config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    halves: dict[str, dict[str, str]] = {}
    for name in tensors:
        layer, _, half = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        if half not in ("lora_A", "lora_B") or not name.endswith(".weight"):
            raise _refusal(file, f"{name} is not part of a plain LoRA")
        halves.setdefault(layer, {})[half] = name
    if not halves:
        raise _refusal(file, "it is empty")
    layers = {}
    for layer, names in halves.items():
        if len(names) < 2:
            raise _refusal(file, f"{layer} has only one of lora_A and lora_B")
        a, b = (_read(file, tensors[names[half]], start) for half in ("lora_A", "lora_B"))
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != config.r or b.shape[1] != config.r:
            raise _refusal(file, f"{layer} has the shapes {a.shape} and {b.shape}, which do not have rank {config.r}")
        layers[layer] = LowRank(a, b * np.float32(scale))
    return Adapter(file, config.r, layers)


def _config(file: Path) -> _Config:
    config_file = file.with_name("adapter_config.json")
    try:
        config = msgspec.json.decode(config_file.read_bytes(), type=_Config)
    except OSError as error:
        raise _refusal(file, f"{config_file.name} in the same directory cannot be read ({error.strerror})") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refusal(config_file, str(error)) from error
    if config.peft_type != "LORA" or config.use_dora or config.bias != "none":
        raise _refusal(config_file, "only plain LoRA without biases is supported")
    if config.use_qalora or config.alora_invocation_tokens:
        raise _refusal(config_file, "QALoRA and activated LoRA are not supported, only plain LoRA")
    if str(config.init_lora_weights).lower().startswith(_CHANGES_THE_MODEL):
        raise _refusal(
            config_file,
            f"{config.init_lora_weights} changes the model's own weights. Save the adapter as plain LoRA with PEFT",
        )
    if config.alpha_pattern or config.rank_pattern:
        raise _refusal(config_file, "different ranks or alphas for single layers are not supported")
    if config.r < 1:
        raise _refusal(config_file, f"its rank is {config.r}")
    return config


def _read(file: Path, tensor: Tensor, start: int) -> NDArray[np.float32]:
    begin, end = tensor.data_offsets
    if tensor.dtype not in _DTYPES:
        raise _refusal(file, f"it has {tensor.dtype} tensors; only {', '.join(_DTYPES)} are supported")
    dtype = np.dtype(_DTYPES[tensor.dtype])
    if min(tensor.shape, default=0) < 1 or begin < 0 or end - begin != math.prod(tensor.shape) * dtype.itemsize:
        raise _refusal(file, f"a tensor of the shape {tensor.shape} has {end - begin:,} bytes")
    raw = np.fromfile(file, dtype, math.prod(tensor.shape), offset=start + begin)
    values = (raw.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == "BF16" else raw.astype(np.float32)
    if not np.isfinite(values).all():
        raise _refusal(file, "it contains infinite numbers or NaN")
    return values.reshape(tensor.shape)


def _refusal(file: Path, reason: str) -> ModelError:
    return ModelError(f"The adapter {file} cannot be used: {reason}.")
