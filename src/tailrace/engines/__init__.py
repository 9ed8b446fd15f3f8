"""Engines, one file a library, and the process that each runs in.

The room's law: an engine library is imported by its own file only, that file is imported in the worker process only,
and what crosses between the worker and the server is one frame a step (`protocol`). `supervisor` is the server's end of
that, `worker` the other. Authors of engines find here what they need: `Engine`, `Capabilities`, `Sequence`, `Delta`,
`EngineSpec` and `Kind` (docs/extending.md).
"""

from __future__ import annotations

from tailrace.engines.kinds import ENGINES_GROUP, KINDS, OF_SOME, Kind, all_kinds, choose, find_kind, load_engine
from tailrace.engines.promise import Capabilities, Delta, Engine, RestartNeeded, Sequence
from tailrace.engines.protocol import EngineSpec
from tailrace.engines.supervisor import Supervisor
from tailrace.engines.worker_process import Receiver

__all__ = [
    "ENGINES_GROUP",
    "KINDS",
    "OF_SOME",
    "Capabilities",
    "Delta",
    "Engine",
    "EngineSpec",
    "Kind",
    "Receiver",
    "RestartNeeded",
    "Sequence",
    "Supervisor",
    "all_kinds",
    "choose",
    "find_kind",
    "load_engine",
]
