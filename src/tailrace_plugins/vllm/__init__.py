"""vLLM, for GPUs. `vllm_engine` implements the interface."""

from __future__ import annotations

from tailrace.engines import GUIDANCE, Kind

__all__ = ["ENGINE"]

ENGINE = Kind(
    "vllm",
    "GPUs, and CPUs where its CPU build is installed",
    formats=("huggingface",),
    preference=3,
    is_for_gpus=True,
    packages=("vllm",),
    extra="vllm",
    cls="tailrace_plugins.vllm.vllm_engine:VllmEngine",
    settings=(
        "kv_tokens", "max_step_tokens", "prefix_cache", "threads", "adapter", "adapter_scale", "device", "dtype",
        "gpu_memory", "gpus",
    ),
    devices=("cpu", "gpu", "cuda", "rocm"),
    reach=GUIDANCE,
    starts_processes=True,
    sees=lambda card: card.has_vision,
    step_tokens=0,  # vLLM takes 2,048 on a CPU to 16,384 on the largest GPUs
)  # fmt: skip
