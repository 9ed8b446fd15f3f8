"""The `tailrace` command, one file a verb."""

from __future__ import annotations

from importlib import import_module

import click

from tailrace import __version__

__all__ = ["main"]


class _Verbs(click.Group):
    """Imports a verb when it is called, so that `--help` is quick."""

    _summaries = {  # noqa: RUF012 - never changed
        "bench": "Measure what the server adds to the engine.",
        "certify": "Measure how exactly the engine repeats itself after a crash.",
        "doctor": "Look at this machine, its engines, and how fast a model could be.",
        "new": "Make a folder with an app that works.",
        "pull": "Fetch a model.",
        "run": "Serve what you have written: an app, a folder, a YAML file.",
        "serve": "Serve a model over HTTP.",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._summaries:
            return None
        command = getattr(import_module(f"tailrace.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(self._summaries.items()))


@click.command(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tailrace")
def main() -> None:
    """Stream a local language model to whoever asks.

    \b
    tailrace serve            fetch a small model, serve it on http://127.0.0.1:8000
    tailrace serve ./my.gguf  serve a model of yours
    tailrace run mine:app     serve code of yours
    """
