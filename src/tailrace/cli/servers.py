"""What the verbs share that speak with a server which runs: where it is, the key, and what is said when it fails."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import click

from tailrace.settings import Settings

__all__ = ["default_url", "server_failures", "server_options"]

Command = Callable[..., None]


def default_url() -> str:
    """Where a server on this machine listens, if nothing else is said than what `tailrace serve` reads as well."""
    port = os.environ.get("TAILRACE_PORT", "")
    return f"http://127.0.0.1:{port if port.isdigit() and int(port) else Settings().port}"


def server_options(command: Command) -> Command:
    """A decorator that adds --url and --key."""
    for option in (
        click.option(
            "--key", envvar="TAILRACE_KEY", show_envvar=True, default="", metavar="KEY",
            help="The key for that server. Other users of this machine can see it here, and not in the environment.",
        ),
        click.option(
            "--url", envvar="TAILRACE_URL", show_envvar=True,
            help="A server that runs. Without it, the one on this machine: http://127.0.0.1:8000, or TAILRACE_PORT.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@contextlib.contextmanager
def server_failures() -> Iterator[None]:
    """Have failures of a server be errors of the command line."""
    from tailrace.terminal.client import AnswerFailed, NoServer, ServerRefused

    try:
        yield
    except NoServer as error:
        raise click.ClickException(f"{error}. `tailrace serve` starts one; --url takes another address.") from None
    except AnswerFailed as error:
        is_locked = isinstance(error, ServerRefused) and error.status == 401
        hint = " --key or TAILRACE_KEY takes a key." if is_locked else ""
        raise click.ClickException(f"{str(error).rstrip('.')}.{hint}") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
