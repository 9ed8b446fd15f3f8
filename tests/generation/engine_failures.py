"""Engine failures, with a restart after each."""

from __future__ import annotations

from tests.generation.harness import Harness

from tailrace.errors import EngineLost
from tailrace.generation import Run
from tailrace.types import TextDelta

__all__ = ["CRASH", "KILL", "code_of", "ids_of", "restart_engine"]

CRASH = EngineLost("The engine stopped: killed by SIGSEGV.", is_crash=True)
KILL = EngineLost("The engine stopped: killed by SIGKILL.")


def ids_of(run: Run) -> list[int]:
    return [i for event in run.log.events if isinstance(event, TextDelta) for i in event.token_ids]


def restart_engine(harness: Harness, error: EngineLost) -> None:
    harness.engine.fail(error)
    harness.engine.restart()


def code_of(run: Run) -> str | None:
    """Return the error code of a run; None if it has not ended with an error."""
    end = run.log.end
    return end.failure.code if end is not None and end.failure is not None else None
