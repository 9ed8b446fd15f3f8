"""JSON schemas of clients: putting them into a plain form that a grammar can keep, and checking whole answers.

This module is the part that engines need, whose processes import it.
"""

from __future__ import annotations

from tailrace.schemas.reach import GUIDANCE, PASSED_ON, PORTABLE, Reach, looser

__all__ = ["GUIDANCE", "PASSED_ON", "PORTABLE", "Reach", "looser"]
