"""`tailrace demo`: a page that shows what streaming is and what a stream survives, without a model at first."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import click

from tailrace.cli.console import say
from tailrace.cli.serve import bound_socket
from tailrace.settings import Settings

__all__ = ["demo"]


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="The real model, as `tailrace pull` takes it.")
@click.option("--offline", is_flag=True, help="Stay with the simulated engine: no model is fetched or loaded.")
@click.option(
    "--port", default=8000, show_default=True, envvar="TAILRACE_PORT", type=click.IntRange(0, 65_535),
    help="Port on 127.0.0.1; 0 takes a free one.",
)  # fmt: skip
def demo(model: str, offline: bool, port: int) -> None:
    """Show on a page what streaming is, and what a stream survives.

    It starts at once with a simulated engine, which needs no model. The real model is fetched meanwhile if it is not
    here, and is used from then on. The page always says which of the two speaks.

    The page can kill the engine and the server, and both come back. So this is a server for one person on one machine:
    it listens on 127.0.0.1 only, and forgets everything when it ends.
    """
    from tailrace.demo.keeper import Keeper
    from tailrace.errors import ModelError

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
