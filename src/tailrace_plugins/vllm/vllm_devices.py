"""The devices on which vLLM computes. It has no choice of its own: its build is for the processor or for GPUs, and its
processes take the first GPUs that they see, which a variable says. Nothing here imports vLLM."""

from __future__ import annotations

from tailrace.errors import ModelError

__all__ = ["seen_gpus"]


def seen_gpus(device: str, *, build: str, num_gpus: int, seen: str) -> str:
    """Return the GPUs that vLLM's processes should see, as `CUDA_VISIBLE_DEVICES` has them, or "" for all.

    `device` is in the common notation. `build` is what the installed vLLM is for: cpu, cuda, rocm or another word.
    `seen` is what this process sees, in which `cuda:1` is the second one. Raises: ModelError if this vLLM does not
    compute there.
    """
    name, _, number = device.partition(":")
    if name and name != build and (name != "gpu" or build == "cpu"):
        raise ModelError(f"The installed vLLM computes on {build}, not on {name}.")
    if not number or build == "cpu":
        return seen
    first = int(number)
    if not seen:
        return ",".join(map(str, range(first, first + num_gpus)))
    found = seen.split(",")[first : first + num_gpus]
    if len(found) < num_gpus:
        raise ModelError(f"There is no {device} for {num_gpus} of the GPUs that this process sees: {seen}.")
    return ",".join(found)
