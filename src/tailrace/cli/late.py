"""Commands whose modules are imported when they are called."""

from __future__ import annotations

from pkgutil import resolve_name

import click

__all__ = ["LateCommand"]


class LateCommand(click.Command):
    """Stands for a command in `tailrace --help`, which then need not import its module. `target` is module:command."""

    def __init__(self, name: str, short_help: str, target: str) -> None:
        super().__init__(name, short_help=short_help)
        self._target = target

    def load(self) -> click.Command:
        command = resolve_name(self._target)
        assert isinstance(command, click.Command)
        return command
