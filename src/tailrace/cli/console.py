"""What the command line writes to stderr: messages, errors and the log, all with one prefix."""

from __future__ import annotations

import logging
import sys

import click

__all__ = ["PREFIX", "say", "say_error", "show_log"]

PREFIX = "tailrace: "


def say(text: str) -> None:
    """A message for the person who started the command."""
    click.echo(text, err=True)


def say_error(text: str) -> None:
    """An error or a warning of the command itself."""
    click.echo(PREFIX + text, err=True)


def show_log() -> None:
    """Send the log of this process to stderr, warnings and errors only. A second call changes nothing."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=PREFIX + "%(message)s")
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
