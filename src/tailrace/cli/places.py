"""Where else than on this machine `tailrace serve` may run a server (docs/extending.md).

Rule: it imports little, since `tailrace serve` imports the modules of all places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tailrace.packages.plugins import load_plugins

if TYPE_CHECKING:
    from tailrace.settings import Settings

__all__ = ["HERE", "ModelArguments", "ServePlace", "place_options", "serve_at", "take_place_options"]

_GROUP = "tailrace.places"  # of entry points
HERE = "here"


@dataclass(frozen=True, slots=True)
class ModelArguments:
    """The models of a command line."""

    first: str | None  # a model without a name of its own
    named: tuple[str, ...]  # name=source
    own: dict[str, dict[str, Any]]  # settings of single models; Any: of each setting's type


@dataclass(frozen=True, slots=True)
class ServePlace:
    """A value of `--on`. `serve` names a function, as module:function. It is called as `serve(models, settings, …)`,
    with `ModelArguments`, `Settings` and the values of `options` by name. It serves until a signal comes, and returns
    the exit status. It raises ValueError, with a text for the user, for what it cannot honour.
    """

    name: str
    text: str  # how the server runs there: "as replicas on Ray Serve"
    serve: str
    options: tuple[click.Option, ...] = ()


@cache
def _installed() -> Mapping[str, ServePlace]:
    return load_plugins(_GROUP, ServePlace, taken=(HERE,), refuses=_refusal).found


def _refusal(place: ServePlace, others: Mapping[str, ServePlace]) -> str:
    from tailrace.settings import settings_table

    taken = {row.flag for row in settings_table()} | {"--config", "--model", "--on", "--set"}
    taken |= {flag for other in others.values() for option in other.options for flag in option.opts}
    twice = [flag for option in place.options for flag in option.opts if flag in taken]
    return f"`tailrace serve` has the option {twice[0]} already" if twice else ""


def place_options() -> list[click.Parameter]:
    """Return `--on` and the options of all places."""
    places = _installed()
    texts = [HERE, *(place.text for place in places.values())]
    on = click.Option(
        ["--on"], type=click.Choice([HERE, *places]), default=HERE, show_default=True,
        help=f"Where the server runs: {', or '.join(texts)}.",
    )  # fmt: skip
    return [on, *(option for place in places.values() for option in place.options)]


def take_place_options(ctx: click.Context, on: str, values: dict[str, Any]) -> dict[str, Any]:  # Any: as click's
    """Remove the options of all places from `values`, and return those of one place.

    Raises: click.UsageError for a given option of another place.
    """
    taken = {}
    for place in _installed().values():
        for option in place.options:
            assert option.name is not None
            value = values.pop(option.name)
            if place.name == on:
                taken[option.name] = value
            elif ctx.get_parameter_source(option.name) is not ParameterSource.DEFAULT:
                raise click.UsageError(f"{option.opts[0]} needs --on {place.name}.")
    return taken


def serve_at(on: str, models: ModelArguments, settings: Settings, options: Mapping[str, Any]) -> int:  # Any: as click's
    """Serve at a place other than here. Returns the exit status. Raises: click.UsageError."""
    serve: Callable[..., int] = resolve_name(_installed()[on].serve)
    try:
        return serve(models, settings, **options)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
