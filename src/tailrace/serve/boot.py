"""What front and replica say to each other before there is anything to serve.

The front never imports what a user wrote. The first process of an app does, and says what it found; then each process
is told which of the app's deployments it is.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace.serve.options import DeploymentOptions

__all__ = ["AppTarget", "Assignment", "Described", "Failed", "Part"]


class AppTarget(msgspec.Struct, frozen=True):
    """What to import, and where."""

    target: str  # `module:attribute`, a folder with an Inferless app, or a file that `serve.run` has written
    app_name: str = "default"
    directory: str = "."  # on the path, and where it runs
    arguments: dict[str, Any] = {}  # of a function that builds the app; any JSON
    overrides: tuple[dict[str, Any], ...] = ()  # options of deployments, each with its `name`
    environment: dict[str, str] = {}
    concurrency: int = 1  # of an Inferless app
    queue_s: float | None = None  # that a request to an Inferless app waits for its turn
    log_level: str = "warning"  # from which on its log is shown
    python: str = ""  # the interpreter that it runs under, "" for the one that runs tailrace


class Part(msgspec.Struct, frozen=True):
    """A deployment as the front knows it."""

    options: DeploymentOptions


class Described(msgspec.Struct, frozen=True):
    """What an app consists of, by name in the order of construction; the last one answers the web."""

    parts: dict[str, Part]
    notes: tuple[str, ...] = ()  # what the user should know


class Assignment(msgspec.Struct, frozen=True):
    """Which deployment a process is."""

    deployment: str
    options: DeploymentOptions
    root_path: str = ""


class Failed(msgspec.Struct, frozen=True):
    """Why it could not be done: one line, and the traceback of the user's code where it has one."""

    message: str
    traceback: str = ""
