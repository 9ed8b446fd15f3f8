"""Output of the command line: messages, errors and the log on stderr with a common prefix, tables, and JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from typing import TextIO

import click

__all__ = ["INTERRUPTED", "PREFIX", "print_json", "print_table", "say", "say_error", "show_log", "size_text"]

PREFIX = "tailrace: "
INTERRUPTED = 130  # exit status after Ctrl-C
_WIDE = 10_000  # columns of a table that no terminal shows


def say(text: str) -> None:
    """Print a message to stderr."""
    click.echo(text, err=True)


def say_error(text: str, *, in_line: bool = False) -> None:
    """Print an error or a warning of the command to stderr. `in_line`: the cursor is not at the start of a line."""
    click.echo(("\n" if in_line else "") + PREFIX + text, err=True)


def show_log(level: str = "warning", *, as_json: bool = False) -> None:
    """Write the log of this process to stderr, from a level on, and the access log, if it is on. Libraries log
    only warnings and errors, except at the level debug. May be called again to change this."""
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(_handler)
    _handler.setFormatter(_JsonLines() if as_json else logging.Formatter(PREFIX + "%(message)s"))
    number = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(number if number == logging.DEBUG else max(number, logging.WARNING))
    logging.getLogger("tailrace").setLevel(number)
    logging.getLogger("tailrace.access").setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.DEBUG if number == logging.DEBUG else logging.CRITICAL)


def print_json(value: object) -> None:
    import msgspec

    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]], *, numbers: Collection[str] = ()) -> None:
    """Print a table. Cells are printed literally, without markup or control characters. In a pipe, none is cut.
    `numbers` are the columns that are aligned on the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tailrace.wording import printable_text

    table = Table(box=None)
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    for row in rows:
        table.add_row(*(Text(printable_text(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else _WIDE).print(table)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which may be replaced later."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger and message. Requests have fields instead of a message."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = getattr(record, "fields", {}) or {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields = fields | {"exception": self.formatException(record.exc_info)}
        return json.dumps({"level": record.levelname.lower(), "logger": record.name, **fields})


_handler = _Stderr()


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
