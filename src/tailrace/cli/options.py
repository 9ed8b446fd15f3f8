"""Settings as options of a command: flags and environment variables, made from their table."""

from __future__ import annotations

import math
from collections.abc import Callable

import click

from tailrace.server.settings import Setting, settings_table

__all__ = ["setting_options"]

Command = Callable[..., None]


def setting_options(*names: str) -> Callable[[Command], Command]:
    """A decorator that adds a flag and an environment variable for each of these settings, in the table's order."""

    def add(command: Command) -> Command:
        for row in reversed([row for row in settings_table() if row.name in names]):
            flag = f"{row.flag}/--no-{row.flag[2:]}" if row.kind is bool else row.flag
            kind = click.Choice(row.choices) if row.choices else row.kind
            command = click.option(
                flag, row.name, type=kind, default=row.default, show_default=True, envvar=row.variable, help=row.text,
                callback=_check_range(row) if row.kind in (int, float) else None,
            )(command)  # fmt: skip
        return command

    return add


def _check_range(row: Setting) -> Callable[[click.Context, click.Parameter, float], float]:
    """Refuses numbers beyond the bounds of a setting, and what is no number or has no end."""

    def check(ctx: click.Context, param: click.Parameter, value: float) -> float:
        if row.least <= value <= row.most and value < math.inf:
            return value
        bounds = f"from {row.least:g} to {row.most:g}" if row.most < math.inf else f"{row.least:g} or more"
        raise click.BadParameter(f"{value} is not {bounds}.", ctx, param)

    return check
