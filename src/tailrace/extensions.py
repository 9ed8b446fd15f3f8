"""Extensions: parts of a server that other packages add, with settings of their own (docs/extending.md).

Rule: it imports little, since every command with settings imports the modules of all extensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from tailrace.packages.plugins import load_plugins

__all__ = ["Extension", "Setting", "installed_extensions"]

_GROUP = "tailrace.extensions"
_MOST = 10**15  # a whole number up to this fits into every message, database and library that it goes to


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting: a flag, an environment variable, and a row of docs/reference.md."""

    name: str
    default: Any  # Any: of type `kind`, or None if the default depends on the engine
    text: str
    kind: type
    least: float = 0  # for numbers
    most: float | None = None
    choices: tuple[str, ...] = ()  # for texts; () allows any text
    of_model: bool = False  # each of several models may have its own value
    is_list: bool = False  # a text that may have several parts, separated by commas; the flag may be repeated
    reloads: bool = False  # it may change while the server runs: nobody keeps a copy

    @property
    def limit(self) -> float:
        """The largest number."""
        return self.most if self.most is not None else _MOST if self.kind is int else math.inf

    @property
    def key(self) -> str:
        """The name as users write it: `for`, where Python's keyword requires the field `for_`."""
        return self.name.rstrip("_")

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return "TAILRACE_" + self.key.upper()


@dataclass(frozen=True, slots=True)
class Extension:
    """A part of a server. `opens` names a function, as module:function. A running server calls it with a
    `tailrace.server.Server` and the values of the settings by their names; it returns an async context manager of a
    `tailrace.server.Opened`."""

    name: str
    opens: str
    settings: tuple[Setting, ...] = ()


@cache
def installed_extensions() -> Mapping[str, Extension]:
    """Return the extensions of all packages, by name."""
    return load_plugins(_GROUP, Extension, taken=(), refuses=_refusal).found


def _refusal(extension: Extension, others: Mapping[str, Extension]) -> str:
    taken = {row.name for other in others.values() for row in other.settings}
    if not all(isinstance(row, Setting) for row in extension.settings):
        return "its settings are not Settings"
    if twice := sorted(taken & {row.name for row in extension.settings}):
        return f"another extension has the setting {twice[0]}"
    return ""
