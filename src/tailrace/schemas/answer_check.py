"""Checks whole answers against the schemas of a request, which grammars may keep only in part."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tailrace.schemas import checking_process

__all__ = ["AnswerCheck", "SchemasAsked"]

logger = logging.getLogger("tailrace.schemas")

_TIMEOUT_S = 20.0  # much longer than the limit of CPU time: reached only on an overloaded machine
_NOT_CHECKED = "the answer could not be checked within the limits of time and memory"


class SchemasAsked(msgspec.Struct, frozen=True, omit_defaults=True):
    """The schemas of a request: of the answer, and of the arguments of each tool."""

    answer: Any = None  # JSON
    arguments: dict[str, Any] = {}  # by the name of the tool


class AnswerCheck:
    """Checks answers, at most two at once. For one event loop."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(2)

    async def __call__(self, pairs: Sequence[tuple[Any, str]]) -> list[list[str]]:
        """Return where each text does not conform to its schema: JSON pointers, with the keyword. Takes 0.1 s in
        another process."""
        if not pairs:
            return []
        try:
            async with self._slots:
                return await asyncio.to_thread(_run, pairs)
        except Exception:  # a defect in tailrace must not keep an answer from its end
            logger.exception("an answer could not be checked")
            return [[_NOT_CHECKED]] * len(pairs)


def _run(pairs: Sequence[tuple[Any, str]]) -> list[list[str]]:
    command = [sys.executable, "-I", str(Path(checking_process.__file__))]
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(pairs), capture_output=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout, type=list[list[str]])
    except (subprocess.TimeoutExpired, OSError):
        pass
    return [[_NOT_CHECKED]] * len(pairs)
