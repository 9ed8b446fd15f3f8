"""Grammars are compiled once in a process that is thrown away, before an engine sees them.

A process for each grammar that was not seen before, rather than one that stays: it costs 0.06 s of a processor once a
schema, which clients repeat, and there is nothing to keep alive, to close, or to leave behind for the next one.
What it compiles with is llguidance, whichever engine comes after; OpenVINO's own compiler cannot be called without its
engine, and is protected by the limits that the wires set.
"""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

from tailrace.engines import grammar_trial
from tailrace.engines.guidance import to_guidance
from tailrace.errors import RequestError
from tailrace.types import Grammar

__all__ = ["GrammarCheck"]

_AT_ONCE = 2
_MOST_KEPT = 1024
_PATIENCE_S = 20.0  # far beyond the processor's time that a trial may take: the machine is overloaded

_REASONS = {
    0: "",
    3: "no answer could conform to it",
    4: "it cannot be compiled",
}
_TOO_MUCH = "compiling it takes too much time or memory"


class GrammarCheck:
    """Refuses grammars that do not compile, or not within limits. To be used on one event loop, which never waits."""

    def __init__(self) -> None:
        self._reasons: OrderedDict[bytes, str] = OrderedDict()  # by what was checked, lately used last
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def check(self, grammar: Grammar) -> None:
        """Raises: RequestError if it cannot be used."""
        key = hashlib.sha256(f"{grammar.kind} {grammar.source}".encode()).digest()
        if key not in self._reasons:
            async with self._places:
                if key not in self._reasons:  # by another who came while this one waited
                    self._reasons[key] = await asyncio.to_thread(_compile, grammar)
        self._reasons.move_to_end(key)
        if len(self._reasons) > _MOST_KEPT:
            self._reasons.popitem(last=False)
        if reason := self._reasons[key]:
            raise RequestError(f"The grammar of this request cannot be used: {reason}.", param="grammar")


def _compile(grammar: Grammar) -> str:
    """Why it cannot be used, or "" if it can. Raises: RequestError where the machine does not get there."""
    command = [sys.executable, "-I", str(Path(grammar_trial.__file__))]
    try:
        done = subprocess.run(
            command, input=to_guidance(grammar).encode(), capture_output=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RequestError(f"The grammar of this request cannot be used: {_TOO_MUCH}.", param="grammar") from None
    return _REASONS.get(done.returncode, _TOO_MUCH)
