"""Engines, one file a library, and the process that each runs in.

The room's law: an engine library is imported by its own file only, that file is imported in the worker process only,
and what crosses between the worker and the server is one frame a step (`protocol`). `supervisor` is the server's end of
that, `worker` the other.
"""

from __future__ import annotations

from tailrace.engines.promise import Engine
from tailrace.engines.protocol import EngineSpec
from tailrace.engines.supervisor import Receiver, Supervisor

__all__ = ["EngineSpec", "Receiver", "Supervisor", "load_engine"]


def load_engine(spec: EngineSpec) -> Engine:
    """Load an engine and its model into this process. Takes seconds and much memory.

    Raises: ModelError if there is no such engine; whatever the library raises if it cannot load the model.
    """
    if spec.engine == "openvino":
        from tailrace.engines.openvino import OpenVINOEngine

        return OpenVINOEngine(spec)
    if spec.engine == "scripted":
        from tailrace.engines.scripted import ScriptedEngine

        return ScriptedEngine(spec)
    from tailrace.errors import ModelError

    raise ModelError(f"There is no engine named {spec.engine!r}; the engines are openvino and scripted.")
