"""`tailrace config`: the settings in force, and where each comes from."""

from __future__ import annotations

import re
from textwrap import fill
from typing import Any

import click
from click.core import ParameterSource

from tailrace.cli.config_file import config_option, settings_by_key
from tailrace.cli.console import print_json
from tailrace.cli.setting_options import model_options, setting_options, settings_in, warn_of_unknown_variables
from tailrace.settings import settings_table

__all__ = ["config"]

_SOURCES = {
    ParameterSource.COMMANDLINE: "flag",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "file",
}
_PASSWORD = re.compile(r"(?<=://)([^/@:]*:)[^/@]*(?=@)|(password=)[^&]*", re.IGNORECASE)


_HEAD = """\
# Settings of `tailrace serve --config tailrace.toml`. Names are those of the flags. A flag or a variable goes before
# this file. Lines with # are the defaults. `tailrace config --config tailrace.toml` checks the file, and shows what is
# in force. After a change, SIGHUP (systemctl reload) lets a server use what it can without a restart, and its log names
# the rest. Keys and their limits are no settings, and change while the server runs.

# The model: a name, a GGUF file, a directory, hf:org/name[:file], or another server.
#model = "smollm2"
"""
_TAIL = """
# More models, each with settings of its own.
#[models.embed]
#source = "minilm"
#idle-unload-s = 600
"""


def _example() -> str:
    """Return a file with all settings as comments."""
    rows = [
        f"\n{fill(row.text, 118, initial_indent='# ', subsequent_indent='# ', break_on_hyphens=False)}\n"
        f"#{name} = {_toml(() if row.is_list else row.default)}\n"
        for name, row in settings_by_key().items()
    ]
    return _HEAD + "".join(rows) + _TAIL


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return '"" # decided by the engine'
    return "[]" if value == () else f'"{value}"' if isinstance(value, str) else str(value)


def _print_example(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        click.echo(_example(), nl=False)
        ctx.exit()


@click.command()
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--example",
    is_flag=True,
    is_eager=True,
    callback=_print_example,
    expose_value=False,
    help="Print a file for --config.",
)
@click.option("--check", is_flag=True, help="Only check: print nothing but what is wrong.")
@click.option("--changed", is_flag=True, help="Only settings that differ from the default.")
@model_options
@setting_options(*(row.name for row in settings_table()))
@click.pass_context
def config(
    ctx: click.Context,
    /,
    as_json: bool,
    check: bool,
    changed: bool,
    model: str,
    named: tuple[str, ...],
    own: dict[str, dict[str, Any]],
    **values: Any,
) -> None:  # Any: click hands over what the table describes
    """Show the settings that `tailrace serve` would use, and where each comes from: a flag, the environment,
    the file of --config or the default. With a file that is wrong it says what, and ends with status 2.

    Accepts the models and flags of `tailrace serve`. It does not look for the models themselves, so whether an engine
    has a setting shows at the start. Passwords in database addresses are hidden.
    """
    settings_in(ctx)
    warn_of_unknown_variables()
    if check:
        return
    rows = [
        {"name": row.key, "value": _shown(values[row.name]), "source": source, "variable": row.variable}
        for row in settings_table()
        if (source := _source(ctx, row.name)) != "default" or not changed
    ]
    where = {"source": _source(ctx, "own"), "variable": "TAILRACE_SET"}
    for one, its in own.items():
        mine = [row for row in settings_table() if row.name in its]
        rows += [{"name": f"{one}.{row.key}", "value": _shown(its[row.name])} | where for row in mine]
    if as_json:
        print_json(rows)
        return
    width = max((len(str(row["name"])) for row in rows), default=0)
    for row in rows:
        value = str(row["value"]).lower() if isinstance(row["value"], bool) else row["value"]
        click.echo(f"{row['name']:<{width}}  {'-' if value in (None, '') else value}  ({row['source']})")


def _source(ctx: click.Context, name: str) -> str:
    source = ctx.get_parameter_source(name)
    return _SOURCES.get(source, "default") if source is not None else "default"


def _shown(value: object) -> object:
    return _PASSWORD.sub(r"\1\2***", value) if isinstance(value, str) else value
