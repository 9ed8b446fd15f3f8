"""The lines of docs/agents.md, as a user pastes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["ADDRESS", "TASK", "Section", "sections", "versions"]

_PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_LINES = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| \[([^]]+)\]\(#[^)]+\) \| ([^ ]+) \|", re.MULTILINE)

ADDRESS = "http://127.0.0.1:8000"
TASK = "List this folder, then write hello.txt."


@dataclass(frozen=True, slots=True)
class Section:
    """What the page prints for one agent."""

    name: str
    install: str
    ways: tuple[str, ...]  # the lines that configure the agent and give it the task; alternatives


@cache
def sections() -> dict[str, Section]:
    """Return the sections of agents by name."""
    _, *rest = _SECTION.split(_PAGE.read_text())
    blocks = {name: _LINES.findall(text) for name, text in zip(rest[::2], rest[1::2], strict=True)}
    return {name: Section(name, found[0], tuple(found[1:])) for name, found in blocks.items() if found}


def versions() -> dict[str, str]:
    """Return the versions of the table."""
    return dict(_ROW.findall(_PAGE.read_text()))
