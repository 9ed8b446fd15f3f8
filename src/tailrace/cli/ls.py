"""`tailrace ls`: the models on this machine."""

from __future__ import annotations

from datetime import datetime

import click

from tailrace.cli.console import print_json, print_table, say

__all__ = ["ls", "size_text"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(as_json: bool) -> None:
    """List the downloaded models, and their size including the files that engines have made of them.

    Models of the Hugging Face hub are in the hub's own cache, which other programs also use.
    """
    from tailrace.models.on_disk import stored_models

    models = stored_models()
    if as_json:
        print_json([{"name": one.name, "bytes": one.num_bytes, "changed_s": one.changed_s} for one in models])
        return
    if not models:
        say("There are no models on this machine. `tailrace pull` downloads one.")
        return
    print_table(
        ["model", "size", "changed"],
        [[model.name, size_text(model.num_bytes), _time_text(model.changed_s)] for model in models],
    )


def _time_text(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).astimezone().strftime("%Y-%m-%d %H:%M")


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
