"""Commands of the outer layer: `tailrace --help` shows them without their modules."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from tailrace.cli.late import LateCommand
from tailrace_outer import outer_commands

_LATE = [getattr(outer_commands, name) for name in outer_commands.__all__]
# Small modules, of which `tailrace.cli.commands` gives commands of plugins what they share.
_SHARED = {f"tailrace_outer.client{name}" for name in ("", ".plain_screen", ".servers")}
_HELP = """
import sys
from tailrace.cli import main

try:
    main(["--help"])
finally:
    print(*(name for name in sys.modules if name.startswith("tailrace_outer.")), file=sys.stderr)
"""


@pytest.mark.parametrize("late", _LATE, ids=lambda late: str(late.name))
def test_each_stands_for_a_command_of_its_name(late: LateCommand) -> None:
    command = late.load()
    assert isinstance(command, click.Command)
    assert command.name == late.name


def test_help_imports_none_of_their_modules() -> None:
    done = subprocess.run([sys.executable, "-c", _HELP], capture_output=True, text=True, check=True)
    assert all(f"  {late.name} " in done.stdout for late in _LATE)
    assert set(done.stderr.split()) - _SHARED == {"tailrace_outer.outer_commands"}
