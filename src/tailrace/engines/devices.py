"""The notation of --device, one for all engines: a name, and a number such as `cuda:1`.

The libraries' own spellings are understood, too: `GPU.1`, `CUDA0`, `mps`, `MTL0`. OpenVINO's combinations, such as
`MULTI:GPU,CPU`, stay as they are.
"""

from __future__ import annotations

import re

from tailrace.errors import ModelError

__all__ = ["DEVICES", "device_name", "read_device"]

DEVICES = ("cpu", "gpu", "cuda", "rocm", "metal", "vulkan", "xpu", "npu")  # gpu: any GPU that the engine can use
_ALIASES = {"mps": "metal", "mtl": "metal", "hip": "rocm"}
_ONE = re.compile(r"([a-z]+)(?:[:.]?([0-9]{1,2}))?", re.ASCII)
_COMBINED = re.compile(r"(auto|multi|hetero)(:[a-z0-9.,:]*)?", re.ASCII)


def read_device(text: str) -> str:
    """Return a device in the common notation; "" if none is named. Raises: ModelError if it is no device."""
    plain = text.strip().lower()
    if not plain or _COMBINED.fullmatch(plain):
        return plain
    found = _ONE.fullmatch(plain)
    name = _ALIASES.get(found[1], found[1]) if found else ""
    if found is None or name not in DEVICES:
        raise ModelError(f"--device is one of {', '.join(DEVICES)}, also with a number, such as cuda:1.")
    return name if found[2] is None else f"{name}:{int(found[2])}"


def device_name(device: str) -> str:
    """Return a device without its number, or the first word of a combination."""
    return device.partition(":")[0]
