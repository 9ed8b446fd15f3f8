"""`tailrace rm`: delete downloaded models."""

from __future__ import annotations

import sys

import click

from tailrace.cli.console import say, size_text

__all__ = ["rm"]


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--yes", "-y", is_flag=True, help="Delete without asking.")
def rm(models: tuple[str, ...], yes: bool) -> None:
    """Delete downloaded models, and the files that engines have made of them. `tailrace ls` lists them.

    Your own files and directories are never deleted. A model of the Hugging Face hub is deleted from the hub's cache,
    which other programs may use.
    """
    from tailrace.errors import ModelError
    from tailrace_outer.measure.on_disk import StoredModel, find_stored

    found: list[StoredModel] = []
    for name in models:
        try:
            stored = find_stored(name)
        except ModelError as error:
            raise click.ClickException(error.message) from None
        if stored is None:
            raise click.ClickException(f"{name} is not a downloaded model. `tailrace ls` lists them.")
        found.append(stored)
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("stdin is not a terminal. Use --yes to delete without asking.")
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
