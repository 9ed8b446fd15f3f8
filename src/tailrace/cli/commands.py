"""What authors of commands need (docs/extending.md). What uses a running server is in the outer layer.

Rule: it imports little, since `tailrace --help` imports the modules of all commands of plugins.
"""

from __future__ import annotations

from pathlib import Path

from tailrace.cli.console import INTERRUPTED, print_json, print_table, say, say_error
from tailrace.cli.places import ModelArguments, ServePlace
from tailrace.wording import printable_text
from tailrace_outer.client.plain_screen import PlainScreen, until_interrupted
from tailrace_outer.client.servers import default_url, server_failures, server_options, tailrace_child

__all__ = [
    "INTERRUPTED",
    "ModelArguments",
    "PlainScreen",
    "ServePlace",
    "data_path",
    "default_url",
    "print_json",
    "print_table",
    "printable_text",
    "say",
    "say_error",
    "server_failures",
    "server_options",
    "tailrace_child",
    "until_interrupted",
]


def data_path() -> Path:
    """Return the directory of the data that tailrace keeps."""
    from tailrace.models.directories import data_path

    return data_path()
