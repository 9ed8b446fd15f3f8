"""`tailrace top`: what a server does, live in a terminal."""

from __future__ import annotations

import sys
import time

import click

from tailrace.cli.commands import default_url, server_options

__all__ = ["top"]

_PIPE_COLUMNS = 160


@click.command(short_help="Show what a server does, live in the terminal.")
@click.option(
    "--every", type=click.FloatRange(0.2, 3600), default=1.0, show_default=True, help="Seconds between two looks."
)
@click.option("--once", is_flag=True, help="Look once, print it and end, as in a pipe.")
@server_options
def top(every: float, once: bool, url: str | None, key: str) -> None:
    """Show the models, the owners and the running streams of a server. Ctrl-C ends it.

    It shows no text. The key needs the scope `admin`, and `metrics` for tokens per second.
    """
    from rich.console import Console
    from rich.live import Live

    from tailrace_plugins.top.looks import Looks, NoLook
    from tailrace_plugins.top.top_screen import screen

    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    with Looks(url or default_url(), key) as looks:
        try:
            look = looks.take()
            if once or not console.is_terminal:
                time.sleep(every)  # tokens per second need two looks
                console.print(screen(looks.take(), sys.maxsize))
                return
            with Live(screen(look, console.height), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(every)
                    live.update(screen(looks.take(), console.height), refresh=True)
        except NoLook as error:
            raise click.ClickException(str(error)) from None
        except KeyboardInterrupt:
            return
