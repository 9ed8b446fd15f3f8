"""Who may run, who waits and who is turned away.

The room's law: every wait is bounded and every refusal says when to come back. What is counted is tokens of
the engine's memory (prompt and the longest possible answer), so that the engine never reaches the end of it by itself.
"""

from __future__ import annotations

from tailrace.admission.gate import Gate, Ticket

__all__ = ["Gate", "Ticket"]
