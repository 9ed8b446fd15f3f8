"""Engines, and the worker process that runs one. All of them are plugins.

Rule: an engine library is imported only in the folder of its plugin, and only in the worker process. The worker
sends the server one frame per step (`protocol`). `supervisor` runs in the server, `worker` in the worker process.
This module exports what authors of engines need; more for them is in `grammars.guidance` and in the package
`tailrace_kit` (docs/extending.md).
"""

from __future__ import annotations

from tailrace.engines.interface import (
    ALL_EXCLUDED,
    GRAMMAR_TOO_COMPLEX,
    Capabilities,
    Delta,
    Engine,
    Prefill,
    Sequence,
    Sight,
)
from tailrace.engines.kinds import (
    ENGINES_GROUP,
    OPTIONAL_SETTINGS,
    EngineChoice,
    FoundModel,
    Kind,
    all_kinds,
    choose,
    find_kind,
    load_engine,
    own_kinds,
)
from tailrace.engines.protocol import EngineSpec
from tailrace.engines.schedule import Schedule
from tailrace.schemas import GUIDANCE, PASSED_ON
from tailrace.wording import in_one_line, listed

__all__ = [
    "ALL_EXCLUDED",
    "ENGINES_GROUP",
    "GRAMMAR_TOO_COMPLEX",
    "GUIDANCE",
    "OPTIONAL_SETTINGS",
    "PASSED_ON",
    "Capabilities",
    "Delta",
    "Engine",
    "EngineChoice",
    "EngineSpec",
    "FoundModel",
    "Kind",
    "Prefill",
    "Schedule",
    "Sequence",
    "Sight",
    "all_kinds",
    "choose",
    "find_kind",
    "in_one_line",
    "listed",
    "load_engine",
    "own_kinds",
]
