"""JSON schemas of clients: putting them into a plain form that a grammar can keep, and checking whole answers."""

from __future__ import annotations

from tailrace.schemas.plain import Plain, plain_form
from tailrace.schemas.reach import GUIDANCE, PASSED_ON, PORTABLE, Reach, looser

__all__ = ["GUIDANCE", "PASSED_ON", "PORTABLE", "Plain", "Reach", "looser", "plain_form"]
