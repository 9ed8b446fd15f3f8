"""`tailrace demo`: a page that shows streaming and the failures that a stream survives."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import click

from tailrace import DEFAULT_MODEL
from tailrace.cli.console import say
from tailrace.cli.serve import bound_socket
from tailrace.settings import Settings

__all__ = ["demo"]


@click.command()
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="The real model, as `tailrace pull` takes it.")
@click.option("--offline", is_flag=True, help="Use only the simulated engine; download and load no model.")
@click.option(
    "--port", default=8000, show_default=True, envvar="TAILRACE_PORT", type=click.IntRange(0, 65_535),
    help="Port on 127.0.0.1; 0 takes a free one.",
)  # fmt: skip
def demo(model: str, offline: bool, port: int) -> None:
    """Show on a page how streaming works, and which failures a stream survives.

    The demo starts at once with a simulated engine, which needs no model. Meanwhile it downloads the real model if
    necessary, and then uses it. The page always says which engine answers.

    The page can kill the engine and the server; both are restarted. The demo listens on 127.0.0.1 only, and deletes its
    data at the end.
    """
    from tailrace.errors import ModelError
    from tailrace_outer.demo.keeper import Keeper

    sock = bound_socket(Settings(port=port))
    if sock is None:
        raise SystemExit(1)
    with sock:
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="tailrace-demo-") as directory:
        try:
            keeper = Keeper(None if offline else model, port, Path(directory), say)
        except ModelError as error:
            raise click.ClickException(error.message) from None
        status = asyncio.run(keeper.run())
    say("Stopped.")
    raise SystemExit(status)
