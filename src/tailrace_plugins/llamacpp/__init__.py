"""llama.cpp, through xllamacpp: any GGUF file. `llamacpp_engine` implements the interface; the other modules are its
parts."""

from __future__ import annotations

from tailrace.engines import GUIDANCE, Kind
from tailrace_plugins.llamacpp.llamacpp_eyes import sees

__all__ = ["ENGINE"]

ENGINE = Kind(
    "llamacpp",
    "any GGUF file; fastest with one stream",
    formats=("gguf",),
    preference=2,
    packages=("xllamacpp",),
    cls="tailrace_plugins.llamacpp.llamacpp_engine:LlamaCppEngine",
    vector_cls="tailrace_plugins.llamacpp.llamacpp_vectors:LlamaCppVectors",
    refuses=lambda card: "it ranks nothing here" if card.task == "rank" else "",
    is_for_one=True,
    reach=GUIDANCE,
    # --exact costs two thirds of the speed.
    settings=("kv_tokens", "max_step_tokens", "prefix_cache", "threads", "device", "exact"),
    devices=("cpu", "gpu", "cuda", "rocm", "metal", "vulkan"),  # of its usual builds
    step_tokens=0,  # it depends on the device
    sees=sees,
)
