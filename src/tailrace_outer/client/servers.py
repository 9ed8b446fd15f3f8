"""Shared by the commands that use a running server: its URL, the key, and errors."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import click

__all__ = ["default_url", "server_failures", "server_options", "tailrace_child"]

Command = Callable[..., None]

_CHILD = """
import sys
from tailrace.__main__ import main
from tailrace.system.child import begin_child
begin_child(int(sys.argv.pop(1)))
main()
"""


def default_url() -> str:
    """Return the default URL of a server on this machine. Reads the same environment as `tailrace serve`."""
    from tailrace.settings import Settings  # imported late: `tailrace --help` needs none

    port = os.environ.get("TAILRACE_PORT", "")
    return f"http://127.0.0.1:{port if port.isdigit() and int(port) else Settings().port}"


def tailrace_child(*arguments: str) -> list[str]:
    """Return the command line of `tailrace ARGUMENTS` for a child process, which ends when this process ends."""
    return [sys.executable, "-P", "-c", _CHILD, str(os.getpid()), *arguments]


def server_options(command: Command) -> Command:
    """Decorator that adds --url and --key."""
    for option in (
        click.option(
            "--key", envvar="TAILRACE_KEY", show_envvar=True, default="", metavar="KEY",
            help="The server's key. Other users of this machine can see flags, but not the environment.",
        ),
        click.option(
            "--url", envvar="TAILRACE_URL", show_envvar=True,
            help="A running server. Default: this machine, http://127.0.0.1:8000 or the port of TAILRACE_PORT.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@contextlib.contextmanager
def server_failures() -> Iterator[None]:
    """Convert failures of a server to errors of the command line."""
    from tailrace_outer.client.connection import AnswerFailed, NoServer, ServerRefused

    try:
        yield
    except NoServer as error:
        raise click.ClickException(
            f"{error}. Start one with `tailrace serve`, or set another address with --url."
        ) from None
    except AnswerFailed as error:
        is_locked = isinstance(error, ServerRefused) and error.status == 401
        hint = " Set a key with --key or TAILRACE_KEY." if is_locked else ""
        raise click.ClickException(f"{str(error).rstrip('.')}.{hint}") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
