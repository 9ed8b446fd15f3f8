"""Hugging Face transformers: any causal model, also one that reads images. `transformers_engine` implements the
interface; the other modules are its parts."""

from __future__ import annotations

from tailrace.engines import GUIDANCE, Kind

__all__ = ["ENGINE"]

ENGINE = Kind(
    "transformers",
    "any causal model of Hugging Face",
    formats=("huggingface",),
    preference=4,
    packages=("torch", "transformers"),
    extra="transformers",
    cls="tailrace_plugins.transformers.transformers_engine:TransformersEngine",
    vector_cls="tailrace_plugins.transformers.transformers_vectors:TransformersVectors",
    reach=GUIDANCE,
    settings=(
        "kv_tokens", "max_step_tokens", "prefix_cache", "threads", "adapter", "adapter_scale", "device", "dtype",
    ),
    devices=("cpu", "gpu", "cuda", "rocm", "metal", "xpu"),
    sees=lambda card: card.has_vision,
)  # fmt: skip
