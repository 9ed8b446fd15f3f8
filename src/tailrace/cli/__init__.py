"""The `tailrace` command, with one file for each subcommand."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from tailrace import __version__
from tailrace.cli.console import say, say_error, show_log
from tailrace.cli.late import LateCommand
from tailrace.wording import did_you_mean

__all__ = ["main"]


_GROUP = "tailrace.commands"  # of entry points


class _Subcommands(click.Group):
    """Imports a subcommand when it is called, so that `--help` is fast: for this, only the entry points of plugins are
    imported. Prints all errors in the same format."""

    _summaries = {  # noqa: RUF012 - never changed
        "completion": "Print a script that makes a shell complete commands with Tab.",
        "config": "Show the settings in force, and where each comes from.",
        "pull": "Download a model.",
        "serve": "Serve a model over HTTP.",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        from tailrace.packages.plugins import plugin_names

        return sorted({*self._summaries, *plugin_names(_GROUP)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._summaries:
            command = self._of_plugins(cmd_name).get(cmd_name)
            return command.load() if isinstance(command, LateCommand) else command
        command = getattr(import_module(f"tailrace.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self._summaries and not args[0].startswith("-"):
            known = self.list_commands(ctx)
            if args[0] not in known:
                from tailrace.cli.other_servers import hint_of_command

                hint = hint_of_command(args[0]) or did_you_mean(args[0], known)
                ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = {name: command.get_short_help_str(100) for name, command in self._of_plugins().items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted((self._summaries | found).items()))

    def _of_plugins(self, only: str | None = None) -> Mapping[str, click.Command]:
        from tailrace.packages.plugins import load_plugins  # needs importlib.metadata; other commands do without it

        return load_plugins(
            _GROUP, click.Command, taken=self._summaries, refuses=lambda command, others: "", only=only
        ).found

    def main(self, *args: Any, **extra: Any) -> NoReturn:  # Any: as click declares it
        """Run a subcommand and exit: status 1 for an error, 2 for a wrong command line, 130 after Ctrl-C."""
        show_log()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # in terminals that are not UTF-8, models write any character
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            if isinstance(error, click.UsageError) and error.ctx is not None:
                say(f"{error.ctx.get_usage()}\nTry '{error.ctx.command_path} --help' for help.\n")
            _name_variable(error)
            say_error(_message_of(error))
            sys.exit(error.exit_code)
        except click.Abort:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would interrupt Python's own exit
            say("Stopped.")
            sys.exit(130)
        except Exception as error:
            from tailrace.errors import ModelError  # imported late, as everything that a subcommand may not need

            if not isinstance(error, ModelError):
                raise
            say_error(error.message)
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)


def _message_of(error: click.ClickException) -> str:
    """Return the message, with the name here of a flag of another server."""
    if isinstance(error, click.NoSuchOption):
        from tailrace.cli.other_servers import hint_of_flag

        if hint := hint_of_flag(error):
            return error.message + hint
    return error.format_message()


def _name_variable(error: click.ClickException) -> None:
    """Add the environment variable's name to the error of a value that came from it."""
    if not isinstance(error, click.BadParameter) or error.param is None or error.ctx is None:
        return
    variable = error.param.envvar
    if error.ctx.get_parameter_source(error.param.name or "") is ParameterSource.ENVIRONMENT and variable:
        error.param_hint = f"{error.param.get_error_hint(error.ctx)} (environment variable {variable})"


@click.command(cls=_Subcommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tailrace")
def main() -> None:
    """Stream a local language model over HTTP.

    \b
    tailrace serve            download a small model, serve it on http://127.0.0.1:8000
    tailrace serve ./my.gguf  serve your own model
    tailrace chat             chat with it
    tailrace run mine:app     serve your own code
    """
