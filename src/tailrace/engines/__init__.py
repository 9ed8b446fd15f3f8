"""Engines, one folder for each library, and the worker process that runs an engine.

Rule: an engine library is imported only in its own folder, and only in the worker process. The worker
sends the server one frame per step (`protocol`). `supervisor` runs in the server, `worker` in the worker process.
Authors of engines need `Engine`, `Capabilities`, `Sequence`, `Delta`, `Prefill`, `EngineSpec` and `Kind`
(docs/extending.md).
"""

from __future__ import annotations

from tailrace.engines.interface import Capabilities, Delta, Engine, Prefill, Sequence
from tailrace.engines.kinds import (
    ENGINES_GROUP,
    KINDS,
    OPTIONAL_SETTINGS,
    EngineChoice,
    Kind,
    all_kinds,
    choose,
    find_kind,
    load_engine,
)
from tailrace.engines.protocol import EngineSpec

__all__ = [
    "ENGINES_GROUP",
    "KINDS",
    "OPTIONAL_SETTINGS",
    "Capabilities",
    "Delta",
    "Engine",
    "EngineChoice",
    "EngineSpec",
    "Kind",
    "Prefill",
    "Sequence",
    "all_kinds",
    "choose",
    "find_kind",
    "load_engine",
]
