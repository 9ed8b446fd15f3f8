"""Options of commands for settings: flags and environment variables, made from the table of settings."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import click
from click.core import ParameterSource

from tailrace import DEFAULT_MODEL
from tailrace.cli.console import say_error
from tailrace.cli.other_servers import hint_of_setting
from tailrace.errors import ModelError
from tailrace.extensions import Setting
from tailrace.settings import Settings, settings_of, settings_table
from tailrace.wording import closest

__all__ = ["is_given", "model_options", "setting_options", "settings_in", "warn_of_unknown_variables"]

Command = Callable[..., None]

_OTHER_VARIABLES = ("CONFIG", "HOME", "KEY", "MODEL", "MODELS", "SET", "UPSTREAM_KEY", "URL")
_OF_KUBERNETES = re.compile("_(SERVICE_HOST|SERVICE_PORT|PORT)(_|$)")  # set in each pod for a Service called tailrace


def setting_options(*names: str) -> Callable[[Command], Command]:
    """Return a decorator that adds a flag and an environment variable for each of these settings, in the table's
    order."""

    def add(command: Command) -> Command:
        for row in reversed([row for row in settings_table() if row.name in names]):
            flag = f"{row.flag}/--no-{row.flag[2:]}" if row.kind is bool else row.flag
            command = click.option(
                flag, row.name, type=_type(row), default=() if row.is_list else row.default, multiple=row.is_list,
                show_default=True, envvar=row.variable, help=row.text,
                callback=_joined if row.is_list else _check_range(row),
            )(command)  # fmt: skip
        return command

    return add


def model_options(command: Command) -> Command:
    """Add MODEL as `model`, `--model` as `named`, and `--set` as `own`, the settings of single models."""
    command = click.option(
        "--set", "own", multiple=True, metavar="NAME.SETTING=VALUE", envvar="TAILRACE_SET", callback=_own_settings,
        help="A setting of a single model, such as big.kv_tokens=8192; may be repeated.",
    )(command)  # fmt: skip
    command = click.option(
        "--model", "named", multiple=True, metavar="NAME=SOURCE", envvar="TAILRACE_MODELS",
        is_eager=True,  # known before --set is checked
        help="An additional model with its own name; may be repeated. TAILRACE_MODELS takes several, separated by "
        "spaces.",
    )(command)  # fmt: skip
    return click.argument("model", default=DEFAULT_MODEL, envvar="TAILRACE_MODEL", is_eager=True)(command)


def warn_of_unknown_variables() -> None:
    """Print a warning for each `TAILRACE_...` in the environment that no command reads. A misspelt setting would
    otherwise have no effect, and nobody would notice."""
    known = {row.variable for row in settings_table()} | {f"TAILRACE_{name}" for name in _OTHER_VARIABLES}
    by_end = {
        name.removeprefix("TAILRACE_").lower(): name for name in known
    }  # the common start makes all names similar
    for name in sorted(os.environ):
        if name.startswith("TAILRACE_") and name not in known and _OF_KUBERNETES.search(name) is None:
            ending = name.removeprefix("TAILRACE_").lower()
            similar = closest(ending, by_end)
            hint = hint_of_setting(ending, ()) or (f" Did you mean {by_end[similar]}?" if similar else "")
            say_error(f"The environment variable {name} is not a setting, and has no effect.{hint}")


def settings_in(ctx: click.Context) -> Settings:
    """Return the settings of a command that has all of them, and models. Raises: click.UsageError if they contradict
    each other."""
    named, own = ctx.params["named"], ctx.params["own"]
    try:
        settings = settings_of({row.name: ctx.params[row.name] for row in settings_table()})
        if named or own:
            from tailrace.assembly.source import checked_names

            checked_names(named, settings, own)
    except (ValueError, ModelError) as error:
        raise click.UsageError(str(error)) from None
    return settings


def is_given(ctx: click.Context, name: str) -> bool:
    """Return whether a flag or the file of --config has a value."""
    return ctx.get_parameter_source(name) in (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)


def _own_settings(
    ctx: click.Context, param: click.Parameter, texts: Sequence[str]
) -> dict[str, dict[str, Any]]:  # Any: of each setting's type
    """Callback of an option with several `model.setting=value`. Returns the settings of each model by its name.

    Raises: click.BadParameter.
    """
    rows = {row.key: row for row in settings_table() if row.of_model}
    own: dict[str, dict[str, Any]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        model, dot, name = key.rpartition(".")
        name = name.replace("-", "_")
        if not (equals and dot and model):
            raise click.BadParameter(f"{text!r} is not model.setting=value, such as chat.threads=4.", ctx, param)
        if name not in rows:
            shared = any(row.key == name for row in settings_table())
            why = "cannot be set for a single model." if shared else f"is not a setting.{hint_of_setting(name, rows)}"
            raise click.BadParameter(f"{name} {why}", ctx, param)
        named = [text.partition("=")[0] for text in ctx.params.get("named") or ()]
        if named and not is_given(ctx, "model") and model not in named:  # else the name of MODEL is not known yet
            raise click.BadParameter(f"there is no model {model}; the models are {', '.join(named)}.", ctx, param)
        row = rows[name]
        try:
            own.setdefault(model, {})[row.name] = _check_range(row)(ctx, param, _type(row).convert(value, param, ctx))
        except click.BadParameter as error:
            raise click.BadParameter(f"{key}: {error.message}", ctx, param) from None
    return own


def _type(row: Setting) -> click.ParamType[Any]:  # Any: of the setting's type
    if row.kind is bool:
        return _Bool()
    if row.name == "engine":
        return _EngineName(row.choices)
    if row.is_list:
        return _Part()
    return click.Choice(row.choices) if row.choices else click.types.convert_type(row.kind)


class _EngineName(click.Choice[str]):
    """A built-in engine, or one of another package. Plugins are loaded only if the name is not built in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # Any: as click's
        if value in self.choices:
            return str(value)
        from tailrace.engines import all_kinds, own_kinds

        others = [name for name in all_kinds() if name not in own_kinds()]
        return click.Choice([*self.choices, *others]).convert(value, param, ctx)


class _Part(click.types.StringParamType):
    """A text of a flag that may be repeated. A variable is one text: spaces in it do not separate."""

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return [rv]


def _joined(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> str:
    """Callback that returns all texts of a flag as one, separated by commas."""
    return ",".join(texts)


class _Bool(click.types.BoolParamType):
    """click's boolean, with an error that names the two words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # Any: as click's
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is not a valid boolean. Write true or false.", param, ctx)


def _check_range(row: Setting) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a callback that rejects numbers out of range, NaN and infinity."""

    def check(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        if row.kind not in (int, float) or (row.least <= value <= row.limit and value < math.inf):
            return value
        bounds = f"from {row.least:g} to {row.limit:g}" if row.limit < math.inf else f"{row.least:g} or more"
        raise click.BadParameter(f"{value} is not {bounds}.", ctx, param)

    return check
