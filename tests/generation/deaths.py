"""Engines that die and restart."""

from __future__ import annotations

from tests.generation.world import World

from tailrace.errors import EngineLost
from tailrace.generation import Run
from tailrace.types import TextDelta

__all__ = ["CRASH", "KILL", "code_of", "die", "ids_of"]

CRASH = EngineLost("The engine stopped: killed by SIGSEGV.", is_crash=True)
KILL = EngineLost("The engine stopped: killed by SIGKILL.")


def ids_of(run: Run) -> list[int]:
    return [i for event in run.log.events if isinstance(event, TextDelta) for i in event.token_ids]


def die(world: World, error: EngineLost) -> None:
    world.engine.lose(error)
    world.engine.come_back()


def code_of(run: Run) -> str | None:
    """The code of the error with which it ended; None if it has not ended with one."""
    end = run.log.end
    return end.failure.code if end is not None and end.failure is not None else None
