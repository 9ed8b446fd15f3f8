"""OpenVINO: the default engine on CPUs. `openvino_engine` implements the interface; the other modules are its parts."""

from __future__ import annotations

from tailrace.engines import GUIDANCE, Kind
from tailrace_plugins.openvino import model_files

__all__ = ["ENGINE"]

ENGINE = Kind(
    "openvino",
    "CPUs; most streams at once",
    formats=("gguf", "openvino", "huggingface"),
    preference=1,
    packages=("openvino",),
    cls="tailrace_plugins.openvino.openvino_engine:OpenVINOEngine",
    vector_cls="tailrace_plugins.openvino.openvino_vectors:OpenVINOVectors",
    settings=(
        "kv_tokens", "max_step_tokens", "prefix_cache", "threads", "adapter", "adapter_scale", "device", "draft",
        "draft_tokens", "exact", "kv_precision", "prompt_lookup_tokens", "weights",
    ),
    exact=True,
    reach=GUIDANCE,
    devices=("cpu", "gpu", "npu", "auto", "multi", "hetero"),
    is_for_intel=True,
    sees=model_files.sees,
    refuses=model_files.why_not,
    weight_bytes=model_files.weight_bytes,
    memory_bytes=model_files.memory_bytes,
    forms=model_files.forms,
    operations_per_s="tailrace_plugins.openvino.ceiling:operations_per_s",
)  # fmt: skip
