"""Measures how exactly an engine repeats itself after its worker was killed.

The room's law: a kill is a SIGKILL of a real worker process, and what is compared are ids that were delivered. Nothing
here is imported by a server; what it finds is kept in the form of `tailrace.engines.certificate`.
"""

from __future__ import annotations

from tailrace.measure.certify.campaign import Tally, certify
from tailrace.measure.certify.prompts import Asker

__all__ = ["Asker", "Tally", "certify"]
