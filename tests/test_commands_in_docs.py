"""Every command of tailrace in the docs, in console blocks and in the text, has options that exist."""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest

from tailrace.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_ANY_BLOCK = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_IN_TEXT = re.compile(r"`(?:[A-Z_]+=\S+ |\.venv/bin/)*tailrace ([^`]+)`")
_BLOCK = re.compile(r"^ *```(?:console)?\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_BEFORE = re.compile(r"[A-Z_]+=.*|sudo|uvx|--from|.*\.whl")
_PROMPT = re.compile(r"^ *\$ ((?:.*\\\n)*.*)$", re.MULTILINE)  # and the lines after a backslash


def _commands(page: str) -> Iterator[list[str]]:
    """Yield the words after each `tailrace` that is a command, also behind variables, sudo and uvx."""
    for block in _BLOCK.findall(page):
        for line in _PROMPT.findall(block):
            words = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars=True)
            words.whitespace_split = True
            for is_separator, group in itertools.groupby(words, lambda word: set(word) <= set(";|&()<>")):
                command = list(itertools.dropwhile(_BEFORE.fullmatch, group))
                if not is_separator and command and command[0].rpartition("/")[2] == "tailrace":
                    yield command[1:]
    yield from map(shlex.split, _IN_TEXT.findall(_ANY_BLOCK.sub("", page)))


def _check(command: click.Command, words: Sequence[str]) -> None:
    """Raises: click.UsageError for an option that does not exist, or a command. Values are not converted."""
    context = click.Context(command)
    _, rest, _ = command.make_parser(context).parse_args(list(words))
    if isinstance(command, click.Group) and rest:
        found = command.get_command(context, rest[0])
        if found is None:
            raise click.UsageError(f"no command {rest[0]}")
        _check(found, rest[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_options_exist(page: Path) -> None:
    for words in _commands(page.read_text()):
        if "parrot" in words:  # of the package that docs/extending.md builds
            continue
        try:
            with contextlib.suppress(click.BadOptionUsage):  # `tailrace serve --on`: the text leaves the value out
                _check(main, words)
        except click.UsageError as error:
            pytest.fail(f"tailrace {' '.join(words)}: {error.format_message()}")


def test_commands_are_found() -> None:
    lines = (
        "$ A=b tailrace serve x --prot 1 &  # tailrace no",
        "$ sudo /bin/tailrace ls \\",
        "  -a | grep tailrace",
        "tailrace",
    )
    text = "\n".join(("```console", *lines, "```", "`tailrace ls`"))
    assert list(_commands(text)) == [["serve", "x", "--prot", "1"], ["ls", "-a"], ["ls"]]
    with pytest.raises(click.NoSuchOption, match="--prot"):
        _check(main, ["serve", "x", "--prot", "1"])
    with pytest.raises(click.UsageError, match="no command"):
        _check(main, ["srve"])
    assert sum(len(list(_commands(page.read_text()))) for page in PAGES) > 250
