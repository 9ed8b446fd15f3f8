"""Measures how exactly an engine repeats its answers after its worker was killed.

Rule: a kill is a SIGKILL of a real worker process, and only delivered ids are compared. A server imports
nothing from here. The result has the format of `tailrace.engines.certificate`.
"""

from __future__ import annotations

from tailrace_outer.measure.certify.campaign import Tally, certify
from tailrace_outer.measure.certify.prompt_maker import PromptMaker

__all__ = ["PromptMaker", "Tally", "certify"]
