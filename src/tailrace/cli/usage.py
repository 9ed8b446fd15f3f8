"""`tailrace usage`: what was asked of a server, and by whom."""

from __future__ import annotations

import contextlib
import csv
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tailrace.cli.console import say
from tailrace.cli.options import setting_options
from tailrace.cli.times import Moment, date_of
from tailrace.settings import Settings

if TYPE_CHECKING:
    from tailrace.records.requests import RequestStore

__all__ = ["usage"]

_GROUPS = ("owner", "key", "model", "wire", "day")
_SUMS = ("num_requests", "num_refused", "num_prompt_tokens", "num_completion_tokens", "total_s")
_TITLES = ("requests", "refused", "prompt tokens", "answer tokens", "seconds")


@click.command()
@click.option("--owner", help="Only this owner's requests.")
@click.option("--key", "key_id", help="Only requests with this key, by its id.")
@click.option("--since", type=Moment(), help="From when on, such as 2026-11-01 or 7d. Without it, this month (UTC).")
@click.option("--until", type=Moment(), help="Up to when. Without it, until now.")
@click.option(
    "--by", type=click.Choice(_GROUPS), multiple=True, default=["owner"], show_default=True,
    help="What is told apart. May be given again.",
)  # fmt: skip
@click.option("--requests", "as_rows", is_flag=True, help="Print the requests themselves, not sums; csv or json.")
@click.option(
    "--format", "form", type=click.Choice(["table", "csv", "json"]),
    help="How it is printed.  [default: table; csv with --requests]",
)  # fmt: skip
@setting_options("database", "data_dir")
def usage(
    owner: str | None,
    key_id: str | None,
    since: float | None,
    until: float | None,
    by: Sequence[str],
    as_rows: bool,
    form: str | None,
    **values: Any,
) -> None:  # Any: click hands over what the table describes
    """Show how many requests and tokens were used, out of the database of a server.

    Sums are of whole days in UTC. Each request is counted in the day in which it came.

    \b
    tailrace usage
    tailrace usage --since 30d --by owner --by day
    tailrace usage --owner alice --requests --format csv > alice.csv
    """
    from tailrace.access.quotas import month_start

    if as_rows and form == "table":
        raise click.UsageError("--requests are printed as csv or json.")
    if since is None:
        since = month_start(time.time())
    with _store(values) as store:
        if as_rows:
            rows = store.rows(owner=owner, key_id=key_id, since_s=since, until_s=until)
            _print_rows(map(msgspec.structs.asdict, rows), form or "csv")
            return
        groups = ["key_id" if name == "key" else name for name in by]
        found = store.usage(by=groups, owner=owner, key_id=key_id, since_s=since, until_s=until)
    table = [{**_said(one, by), **{name: getattr(one, name) for name in _SUMS}} for one in found]
    if form in ("csv", "json"):
        _print_rows(table, form)
    elif not table:
        say(f"Nothing was asked since {date_of(since)}.")
    else:
        _print_table(table, by)


def _said(one: Any, by: Sequence[str]) -> dict[str, Any]:  # Any: a UsageSum, whose import takes a database's time
    """What a sum is of."""
    known = {"key": one.key_id, "day": (date_of(one.start_s) or "")[:10]}
    return {name: known[name] if name in known else getattr(one, name) for name in by}


def _print_table(table: Sequence[dict[str, Any]], by: Sequence[str]) -> None:  # Any: text and numbers
    from rich.console import Console
    from rich.table import Table

    shown = Table(*by, box=None)
    for title in _TITLES:
        shown.add_column(title, justify="right")
    for row in table:
        shown.add_row(*(str(row[name]) for name in by), *(f"{row[name]:,.0f}" for name in _SUMS))
    Console().print(shown)


def _print_rows(rows: Iterable[dict[str, Any]], form: str) -> None:  # Any: text and numbers
    """CSV with a header, or one JSON object a line."""
    if form == "json":
        for row in rows:
            sys.stdout.buffer.write(msgspec.json.encode(row) + b"\n")
        return
    writer: csv.DictWriter[str] | None = None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(sys.stdout, list(row))
            writer.writeheader()
        writer.writerow({name: _harmless(value) for name, value in row.items()})


def _harmless(value: object) -> object:
    """Spreadsheets run what begins like a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


@contextlib.contextmanager
def _store(values: dict[str, Any]) -> Iterator[RequestStore]:  # Any: of each setting's type
    """The records in the database that the options name. Errors of it are the command line's."""
    from tailrace.errors import ModelError, StorageError
    from tailrace.records.requests import RequestStore
    from tailrace.records.service import open_database

    try:
        with contextlib.closing(open_database(Settings(**values))) as database:
            yield RequestStore(database)
    except (ModelError, StorageError) as error:
        raise click.ClickException(error.message) from None
