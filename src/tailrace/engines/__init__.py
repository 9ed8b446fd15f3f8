"""Engines, one file a library, and the process that each runs in.

The room's law: an engine library is imported by its own file only, that file is imported in the worker process only,
and what crosses between the worker and the server is one frame a step (`protocol`). `supervisor` is the server's end of
that, `worker` the other.
"""

from __future__ import annotations

from tailrace.engines.kinds import KINDS, Kind, choose, load_engine
from tailrace.engines.protocol import EngineSpec
from tailrace.engines.supervisor import Receiver, Supervisor

__all__ = ["KINDS", "EngineSpec", "Kind", "Receiver", "Supervisor", "choose", "load_engine"]
