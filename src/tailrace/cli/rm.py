"""`tailrace rm`: delete models that were fetched."""

from __future__ import annotations

import sys

import click

from tailrace.cli.console import say
from tailrace.cli.ls import size_text

__all__ = ["rm"]


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def rm(models: tuple[str, ...], yes: bool) -> None:
    """Delete models that were fetched, and what engines have made of them. `tailrace ls` lists them.

    Files and directories of your own are never deleted. A model of the Hugging Face hub goes from its cache, where
    other programs may use it.
    """
    from tailrace.errors import ModelError
    from tailrace.models.on_disk import StoredModel, find_stored

    found: list[StoredModel] = []
    for name in models:
        try:
            stored = find_stored(name)
        except ModelError as error:
            raise click.ClickException(error.message) from None
        if stored is None:
            raise click.ClickException(f"{name} is no model that was fetched. `tailrace ls` lists them.")
        found.append(stored)
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("There is nobody to ask. --yes deletes without asking.")
        for model in found:
            shared = ", which other programs may use" if model.is_shared else ""
            say(f"{model.name}: {size_text(model.num_bytes)}{shared}")
        click.confirm("Delete?", abort=True, err=True)
    for model in found:
        try:
            model.remove()
        except OSError as error:
            raise click.ClickException(f"{model.name} cannot be deleted: {error.strerror}.") from None
        say(f"Deleted {model.name}: {size_text(model.num_bytes)}.")
