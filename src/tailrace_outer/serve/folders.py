"""Kinds of folders that `tailrace run` serves, and what their authors need (docs/extending.md).

Rule: the front imports the module of a kind, so this module imports no user code and little else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tailrace.packages.requirements import pip_install
from tailrace_outer.serve.deployment import Application
from tailrace_outer.serve.failures import TargetError, set_requirements
from tailrace_outer.serve.stream import first_of

__all__ = ["AppFolder", "FolderApp", "TargetError", "first_of", "pip_install", "set_requirements"]


@dataclass(frozen=True, slots=True)
class AppFolder:
    """A kind of folders. `load` names a function, `module:function`, which the app's process calls as
    `load(folder, concurrency=…, queue_s=…)`: with the path of the folder, the number of calls that may run at once, and
    the longest wait of a request in seconds or None. It returns a `FolderApp`, and raises TargetError if the folder is
    not an app.
    """

    name: str
    text: str  # what such a folder is: "an Inferless app"
    file: str  # the file that makes a folder one of this kind
    load: str
    wire_prefix: str = (
        ""  # of the paths that answer on one of tailrace's wires, also with its errors: "/v2/" is Triton's
    )


class FolderApp(NamedTuple):
    app: Application
    notes: Sequence[str] = ()  # for the user
