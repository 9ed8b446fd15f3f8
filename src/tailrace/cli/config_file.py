"""`--config FILE`: settings from a TOML file, with the names of the flags."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from tailrace.cli.other_servers import hint_of_setting
from tailrace.cli.setting_options import setting_options
from tailrace.extensions import Setting
from tailrace.settings import settings_table

__all__ = ["config_option", "file_options", "settings_by_key"]

_Decorator = Callable[[Callable[..., None]], Callable[..., None]]

_SOURCE, _MODEL, _MODELS = "source", "model", "models"


def settings_by_key() -> dict[str, Setting]:
    """Return all settings by their names in the file."""
    return {row.flag.removeprefix("--"): row for row in settings_table()}


def _read(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    """Callback: the file's values become the defaults of the other parameters, below flags and variables."""
    if path is None:
        return
    try:
        with path.open("rb") as file:
            ctx.default_map = _defaults(tomllib.load(file))
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read: {error.strerror}.", ctx, param) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError) as error:
        raise click.BadParameter(f"{path}: {error}", ctx, param) from None


def _defaults(content: Mapping[str, Any]) -> dict[str, Any]:  # Any: whatever TOML has
    """Return values by the names of click's parameters. Raises: ValueError, which names what is wrong."""
    rows = settings_by_key()
    defaults: dict[str, Any] = {}
    for name, value in content.items():
        if name == _MODELS:
            defaults |= _models(value)
        elif name == _MODEL:
            defaults[_MODEL] = _text(value, _MODEL)
        else:
            row = _row(name, rows)
            defaults[row.name] = _texts(value, name) if row.is_list else _plain(value, name)
    return defaults


def _models(content: object) -> dict[str, Any]:  # Any: as above
    """Return `--model` and `--set` for the tables of models."""
    if not isinstance(content, dict) or not all(isinstance(one, dict) for one in content.values()):
        raise ValueError("models should be tables, such as [models.chat] with a source.")
    rows = {name: row for name, row in settings_by_key().items() if row.of_model}
    sources, own = [], []
    for name, values in content.items():
        where = f"models.{name}"
        if _SOURCE not in values:
            raise ValueError(f'{where} needs a source, such as source = "smollm2".')
        sources.append(f"{name}={_text(values[_SOURCE], f'{where}.{_SOURCE}')}")
        for key, value in values.items():
            if key != _SOURCE:
                row = _row(key, rows, where)
                plain = ",".join(_texts(value, key)) if row.is_list else _plain(value, f"{where}.{key}")
                own.append(f"{name}.{row.key}={str(plain).lower() if isinstance(plain, bool) else plain}")
    return {"named": sources, "own": own}


def _row(name: str, rows: Mapping[str, Setting], where: str = "") -> Setting:
    key = name.replace("_", "-")
    if key in rows:
        return rows[key]
    shown = f"{where}.{name}" if where else name
    if key in settings_by_key():
        raise ValueError(f"{shown} cannot be set for a single model.")
    raise ValueError(f"{shown} is not a setting.{hint_of_setting(key, (*rows, _MODEL, _MODELS))}")


def _plain(value: object, name: str) -> object:
    if not isinstance(value, (str, int, float, bool)):
        raise ValueError(f"{name} should be a text, a number, true or false.")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} should be a text.")
    return value


def _texts(value: object, name: str) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [_text(one, name) for one in values]


def _option(callback: Callable[[click.Context, click.Parameter, Path | None], None], text: str) -> _Decorator:
    return click.option(
        "--config",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="TAILRACE_CONFIG",
        is_eager=True,  # before the parameters whose defaults it has
        callback=callback,
        expose_value=False,
        metavar="FILE",
        help=text,
    )


config_option = _option(
    _read,
    "A TOML file with settings, named like the flags; flags and variables go before it. `tailrace config --example` "
    "prints one.",
)


def file_options(*names: str) -> _Decorator:
    """Return a decorator that adds these settings, and `--config` for the file of the server that has them: a command
    that works on what a server keeps finds it where that server does."""

    def read(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
        _read(ctx, param, path)
        if ctx.default_map is not None:
            ctx.default_map = {name: value for name, value in ctx.default_map.items() if name in names}

    add_settings, add_file = (
        setting_options(*names),
        _option(read, "The server's file of settings, of which it uses these."),
    )
    return lambda command: add_settings(add_file(command))
