"""Admission: which requests run, which wait in the queue, and which are refused.

Every wait has a limit, and every refusal has a Retry-After. The budget counts tokens of the engine's memory: the prompt
and the longest possible answer. So the engine never runs out of memory.
"""

from __future__ import annotations

from tailrace.admission.gate import Asker, Gate, QueueEntry

__all__ = ["Asker", "Gate", "QueueEntry"]
