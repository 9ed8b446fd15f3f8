"""Where llama.cpp computes: the processor, or the GPUs that its build knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xllamacpp

from tailrace.errors import ModelError

__all__ = ["find_gpus", "set_device"]

_GPU, _INTEGRATED = 1, 2  # values of ggml_backend_dev_type


def find_gpus(devices: Sequence[Mapping[str, Any]]) -> list[str]:  # Any: as the library has them
    """Return the names of the GPUs that llama.cpp takes by itself, in its order: integrated ones only if there is no
    other, and each only once, also if two backends see it. `devices` are those of `get_device_info`."""
    for wanted in (_GPU, _INTEGRATED):
        by_id: dict[str, str] = {}
        for device in devices:
            if int(device["type"]) == wanted:
                by_id.setdefault(device["device_id"] or device["name"], device["name"])
        if by_id:
            return list(by_id.values())
    return []


def set_device(params: Any, device: str, gpus: Sequence[str]) -> bool:  # Any: the library has no stubs
    """Set where the layers are computed, and return whether this is a GPU. As many layers as fit get into its memory.

    `device` is `cpu`, the name of a GPU (`CUDA0`, `cuda:0`, `cuda`, `metal`), `gpu` for all GPUs, `gpu:1` for one of
    them, or "" for all GPUs or, if there are none, the processor.

    Raises: ModelError if there is no such device.
    """
    if not device or (device == "gpu" and gpus):
        return bool(gpus)
    params.split_mode = xllamacpp.llama_split_mode.LLAMA_SPLIT_MODE_NONE  # one device, which is:
    if device.lower() == "cpu":
        params.main_gpu = -1
        params.n_gpu_layers = 0
        return False
    names = [name.lower() for name in gpus]
    plain = device.lower().replace(":", "").replace(".", "").replace("metal", "mtl")
    wanted = plain if plain[-1:].isdigit() else f"{plain}0"
    if wanted.startswith("gpu") and int(wanted[3:]) < len(names):
        wanted = names[int(wanted[3:])]
    if wanted not in names:
        known = ", ".join(["cpu", *gpus])
        hint = "" if gpus else " This build of xllamacpp has no GPUs: docs/engines.md says where others come from."
        raise ModelError(f"llama.cpp has no device {device!r}. Its devices are: {known}.{hint}")
    params.main_gpu = names.index(wanted)
    return True
