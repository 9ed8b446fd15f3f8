"""`tailrace batch`: run the rows of a file on a server, and write the results beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tailrace.cli.commands import INTERRUPTED, default_url, say, say_error, server_failures, server_options

if TYPE_CHECKING:
    from tailrace_plugins.batches.following import Followed

__all__ = ["batch"]


@click.command(short_help="Run the requests of a file, and write the results beside it.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for the results. Default: FILE.results.jsonl.",
)
@click.option("--window", default="24h", show_default=True, help="How long it may take, such as 30m, 24h or 7d.")
@click.option("--new", "is_new", is_flag=True, help="Run all rows, although the server knows a batch of this file.")
@click.option("--cancel", is_flag=True, help="Cancel the batch of this file, and write what is done.")
@server_options
def batch(
    file: Path, output: Path | None, window: str, *, is_new: bool, cancel: bool, url: str | None, key: str
) -> None:
    """Run the rows of FILE on a server, and write the results beside it.

    Each line of FILE is a request in the format of OpenAI's batches. The rows run in the server, behind all other
    requests. The same command continues where it was: after Ctrl-C, after a restart of the server, or on another day.
    Rows with errors are in a second file, FILE.errors.jsonl.
    """
    import asyncio

    from tailrace_plugins.batches.following import follow

    output = output or file.with_name(f"{file.name}.results.jsonl")
    try:
        with server_failures():
            followed = asyncio.run(
                follow(url or default_url(), key, file, output, window, is_new=is_new, cancel=cancel)
            )
    except KeyboardInterrupt:
        say_error("The batch goes on in the server. The same command shows it again; --cancel ends it.")
        raise SystemExit(INTERRUPTED) from None
    _report(followed)


def _report(followed: Followed) -> None:
    for error in followed.problems:
        say_error(error)
    if followed.results is not None:
        say(f"{followed.num_answers} of {followed.num_rows} rows have an answer: {followed.results}")
    if followed.errors is not None:
        say_error(f"{followed.num_errors} of {followed.num_rows} rows have an error: {followed.errors}")
    if followed.status != "completed":
        say_error(f"The batch is {followed.status}.")
    if followed.status != "completed" or followed.num_errors:
        raise SystemExit(1)
