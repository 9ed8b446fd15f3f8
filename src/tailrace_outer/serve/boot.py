"""The messages between front and replica while an app starts.

The front never imports user code. The first process of an app imports it and describes it to the front. The front then
assigns one of the app's deployments to each process.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace_outer.serve.options import DeploymentOptions

__all__ = ["AppTarget", "Assignment", "Described", "Failed", "FolderKind", "Part"]


class FolderKind(msgspec.Struct, frozen=True):
    """How to load a folder. Other interpreters do not find the package of the loader, so its directory is given."""

    text: str  # what it is, in words
    load: str  # module:function
    package: str  # the directory of the module's top package
    wire_prefix: str = ""  # as `AppFolder.wire_prefix`


class AppTarget(msgspec.Struct, frozen=True):
    """The app to import, and how."""

    target: str  # `module:attribute`, a folder, or a file that `serve.run` has written
    app_name: str = "default"
    directory: str = "."  # the working directory, also on sys.path
    arguments: dict[str, Any] = {}  # of the function that builds the app; any JSON
    overrides: tuple[dict[str, Any], ...] = ()  # options of deployments, each with the deployment's `name`
    environment: dict[str, str] = {}
    kind: FolderKind | None = None  # of a folder
    concurrency: int = 1  # of a folder's app
    queue_s: float | None = None  # longest wait of a request to a folder's app
    log_level: str = "warning"  # of the app's log
    python: str = ""  # the app's interpreter; "" for the one that runs tailrace


class Part(msgspec.Struct, frozen=True):
    """A deployment, as described to the front."""

    options: DeploymentOptions


class Described(msgspec.Struct, frozen=True):
    """An app's deployments by name, in the order of construction. The last one is the ingress."""

    parts: dict[str, Part]
    notes: tuple[str, ...] = ()  # for the user


class Assignment(msgspec.Struct, frozen=True):
    """Tells a process which deployment it becomes."""

    deployment: str
    options: DeploymentOptions
    root_path: str = ""


class Failed(msgspec.Struct, frozen=True):
    """A failure: a message of one line, and the traceback of the user's code if there is one."""

    message: str
    traceback: str = ""
