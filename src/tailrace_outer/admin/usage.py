"""`tailrace usage`: requests and tokens by owner, key, model, wire or day."""

from __future__ import annotations

import contextlib
import csv
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tailrace.cli.config_file import file_options
from tailrace.cli.console import print_table, say
from tailrace.settings import Settings
from tailrace_outer.admin.times import Moment, date_of

if TYPE_CHECKING:
    from tailrace.records.request_store import RequestStore

__all__ = ["usage"]

_GROUPS = ("owner", "key", "model", "wire", "day")
_SUMS = ("num_requests", "num_refused", "num_prompt_tokens", "num_completion_tokens", "total_s")
_TITLES = ("requests", "refused", "prompt tokens", "answer tokens", "seconds")


@click.command()
@click.option("--owner", help="Only this owner's requests.")
@click.option("--key", "key_id", help="Only requests with this key, by its id.")
@click.option("--since", type=Moment(), help="Start, such as 2026-11-01 or 7d. Default: the start of this month (UTC).")
@click.option("--until", type=Moment(), help="End. Default: now.")
@click.option(
    "--by", type=click.Choice(_GROUPS), multiple=True, help="What to group by. May be repeated.  [default: owner]",
)  # fmt: skip
@click.option("--requests", "as_rows", is_flag=True, help="Print single requests instead of sums, as csv or json.")
@click.option(
    "--format", "form", type=click.Choice(["table", "csv", "json"]),
    help="Output format.  [default: table; csv with --requests]",
)  # fmt: skip
@file_options("database", "data_dir")
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
    """Show how many requests and tokens were used, from the database of a server.

    Sums are for whole days in UTC. A request counts for the day on which it arrived.

    \b
    tailrace usage
    tailrace usage --since 30d --by owner --by day
    tailrace usage --owner alice --requests --format csv > alice.csv
    """
    from tailrace.access.quotas import month_start

    if as_rows and by:
        raise click.UsageError("--requests prints single requests, which --by cannot group.")
    by = by or ("owner",)
    if as_rows and form == "table":
        raise click.UsageError("--requests supports only the formats csv and json.")
    if since is None:
        since = month_start(time.time())
    with _store(values) as store:
        if as_rows:
            rows = store.rows(owner=owner, key_id=key_id, since_s=since, until_s=until)
            _print_rows(map(msgspec.structs.asdict, rows), form or "csv")
            return
        groups = ["key_id" if name == "key" else name for name in by]
        found = store.usage(by=groups, owner=owner, key_id=key_id, since_s=since, until_s=until)
    table = [{**_group_of(one, by), **{name: getattr(one, name) for name in _SUMS}} for one in found]
    if form in ("csv", "json"):
        _print_rows(table, form)
    elif not table:
        say(f"There were no requests since {date_of(since)}.")
    else:
        _print_table(table, by)


def _group_of(one: Any, by: Sequence[str]) -> dict[str, Any]:  # Any: a UsageSum, whose import takes a database's time
    """Return the group of a sum."""
    known = {"key": one.key_id, "day": (date_of(one.start_s) or "")[:10]}
    return {name: known[name] if name in known else getattr(one, name) for name in by}


def _print_table(table: Sequence[dict[str, Any]], by: Sequence[str]) -> None:  # Any: text and numbers
    rows = ([*(str(row[name]) for name in by), *(f"{row[name]:,.0f}" for name in _SUMS)] for row in table)
    print_table((*by, *_TITLES), rows, numbers=_TITLES)


def _print_rows(rows: Iterable[dict[str, Any]], form: str) -> None:  # Any: text and numbers
    """Print CSV with a header, or one JSON object per line."""
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
    """Escape text that a spreadsheet would run as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


@contextlib.contextmanager
def _store(values: dict[str, Any]) -> Iterator[RequestStore]:  # Any: of each setting's type
    """Open the records in the database of the options. Converts its errors to errors of the command line."""
    from tailrace.errors import ModelError, StorageError
    from tailrace.records.records_service import absent_database, open_database
    from tailrace.records.request_store import RequestStore

    settings = Settings(**values)
    if (path := absent_database(settings)) is not None:  # opening would create it, and servers would record requests
        raise click.ClickException(
            f"There is no database at {path}. Is this the server's --data-dir or --database? A server without "
            "--database creates it with the first key or conversation."
        )
    try:
        with contextlib.closing(open_database(settings)) as database:
            yield RequestStore(database)
    except (ModelError, StorageError) as error:
        raise click.ClickException(error.message) from None
