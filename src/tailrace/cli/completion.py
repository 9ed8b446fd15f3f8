"""`tailrace completion`: a script that makes a shell complete commands and flags with Tab."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["completion"]

_COMPLETE = "_TAILRACE_COMPLETE"  # click derives it from the command's name


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a SHELL.

    \b
    echo 'eval "$(tailrace completion bash)"' >> ~/.bashrc
    echo 'eval "$(tailrace completion zsh)"' >> ~/.zshrc
    tailrace completion fish > ~/.config/fish/completions/tailrace.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    root = click.get_current_context().find_root().command
    click.echo(kind(root, {}, "tailrace", _COMPLETE).source())
