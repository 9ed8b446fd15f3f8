"""A deterministic fake model for tests, load and demonstrations. `scripted_engine` implements the interface."""

from __future__ import annotations

from tailrace.engines import Kind

__all__ = ["ENGINE"]

ENGINE = Kind(
    "scripted",
    "tests, load and demonstrations",
    formats=("scripted",),
    prefixes=("scripted",),
    finds="tailrace_outer.scripted.scripted_models:find_scripted",
    preference=6,
    cls="tailrace_outer.scripted.scripted_engine:ScriptedEngine",
    vector_cls="tailrace_outer.scripted.scripted_vectors:ScriptedVectors",
    sees=lambda card: True,
    settings=("adapter", "adapter_scale", "kv_tokens"),
)
