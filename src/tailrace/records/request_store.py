"""The rows of requests in the database, and their sums per day."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import Connection, TextClause, delete, func, select, text
from sqlalchemy.dialects import postgresql, sqlite

from tailrace.access.quotas import Spending, month_start
from tailrace.conversations.drafts import clean
from tailrace.records.database_tables import requests, usage_days
from tailrace.records.key_store import find_forgotten
from tailrace.records.record_database import RecordDatabase
from tailrace.records.request_rows import REFUSED, RequestRow

__all__ = ["GROUPS", "RequestStore", "UsageSum"]

_DAY_S = 86_400
_MINUTE_S = 60
_BATCH = 1000  # rows per transaction; a transaction writes each page of an index once
_PAGE = 1000
# The columns that sums can be grouped by.
GROUPS = ("owner", "key_id", "model", "wire", "day")
_COUNTS = ("num_requests", "num_refused", "num_prompt_tokens", "num_completion_tokens", "total_s")
_KEY = ("day", "owner", "key_id", "model", "wire")


class UsageSum(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sum of requests. Columns that were not grouped by are None. `start_s` is since the epoch."""

    num_requests: int  # that were accepted
    num_refused: int
    num_prompt_tokens: int
    num_completion_tokens: int
    total_s: float  # sum of the durations
    owner: str | None = None
    key_id: str | None = None
    model: str | None = None
    wire: str | None = None
    start_s: int | None = None  # of the day, in UTC


class RequestStore:
    """Adds rows, and sums them. Calls block. Raises: StorageError."""

    def __init__(self, database: RecordDatabase) -> None:
        self._database = database

    def add(self, rows: Sequence[RequestRow]) -> None:
        """Add rows. Rows of requests that are already there are ignored, and rows of deleted owners' keys."""
        for start in range(0, len(rows), _BATCH):
            with self._database.begin() as connection:
                self._add(connection, rows[start : start + _BATCH])

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return those of these requests that have a row."""
        with self._database.begin() as connection:
            return _known(connection, ids)

    def usage(
        self,
        *,
        by: Sequence[str] = (),
        owner: str | None = None,
        key_id: str | None = None,
        since_s: float = 0.0,
        until_s: float | None = None,
    ) -> list[UsageSum]:
        """Return sums over the days (UTC) that end after `since_s` and begin before `until_s`: one for each combination
        of the columns `by`, which are from `GROUPS`."""
        columns = {name: usage_days.c[name] for name in by}
        sums = [func.sum(usage_days.c[name]).label(name) for name in _COUNTS]
        query = select(*(column.label(name) for name, column in columns.items()), *sums)
        query = query.where(usage_days.c.day >= since_s // _DAY_S * _DAY_S)
        if until_s is not None:
            query = query.where(usage_days.c.day < until_s)
        if owner is not None:
            query = query.where(usage_days.c.owner == owner)
        if key_id is not None:
            query = query.where(usage_days.c.key_id == key_id)
        if columns:
            query = query.group_by(*columns.values()).order_by(*columns.values())
        with self._database.begin() as connection:
            found = connection.execute(query).mappings().all()
        return [_usage(row) for row in found if row["num_requests"] is not None]

    def rows(
        self, *, owner: str | None = None, key_id: str | None = None, since_s: float = 0.0, until_s: float | None = None
    ) -> Iterator[RequestRow]:
        """Yield the rows of requests in [since, until), the oldest first. Reads them in pages."""
        after: tuple[float, str] = (since_s, "")
        while True:
            is_later = (requests.c.created_s > after[0]) | (
                (requests.c.created_s == after[0]) & (requests.c.request_id > after[1])
            )
            query = select(requests).where(is_later).order_by(requests.c.created_s, requests.c.request_id).limit(_PAGE)
            for column, wanted in ((requests.c.owner, owner), (requests.c.key_id, key_id)):
                if wanted is not None:
                    query = query.where(column == wanted)
            if until_s is not None:
                query = query.where(requests.c.created_s < until_s)
            with self._database.begin() as connection:
                found = connection.execute(query).mappings().all()
            for row in found:
                yield RequestRow(**row)
            if len(found) < _PAGE:
                return
            after = (found[-1]["created_s"], found[-1]["request_id"])

    def spent(self, now_s: float) -> list[Spending]:
        """Return what each key and each owner has spent in the current month and in the current minute."""
        spendings: list[Spending] = []
        with self._database.begin() as connection:
            for kind, name in (("key", "key_id"), ("owner", "owner")):
                spendings += _spent(connection, kind, name, "month", month_start(now_s))
                spendings += _spent(connection, kind, name, "minute", now_s // _MINUTE_S * _MINUTE_S)
        return spendings

    def delete_before(self, created_s: float) -> int:
        """Delete the rows of older requests. Returns how many there were. The sums stay."""
        with self._database.begin(is_long=True) as connection:
            return connection.execute(delete(requests).where(requests.c.created_s < created_s)).rowcount

    def forget(self, owner: str) -> int:
        """Delete all rows of an owner. Returns how many rows there were."""
        with self._database.begin(is_long=True) as connection:
            connection.execute(delete(usage_days).where(usage_days.c.owner == owner))
            return connection.execute(delete(requests).where(requests.c.owner == owner)).rowcount

    def _add(self, connection: Connection, rows: Sequence[RequestRow]) -> None:
        by_id = {row.request_id: _without_nul(row) for row in reversed(rows)}
        if connection.dialect.name == "postgresql":
            # Only one server writes the rows of a request. But the server may still run its last attempt, which had no
            # answer in time: the sums would count twice.
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(7218412936)")
        forgotten = find_forgotten(connection, (row.key_id for row in rows))
        known = _known(connection, list(by_id))
        new = [row for name, row in by_id.items() if name not in known and row.key_id not in forgotten]
        if not new:
            return
        # The driver's own executemany: an insert by SQLAlchemy takes three times the processor time.
        connection.exec_driver_sql(_insert_text(connection), [msgspec.structs.astuple(row) for row in new])
        sums: dict[tuple[Any, ...], list[float]] = {}  # Any: text and one number
        for row in new:
            day = int(row.created_s // _DAY_S * _DAY_S)
            sum_ = sums.setdefault((day, row.owner, row.key_id, row.model, row.wire), [0] * len(_COUNTS))
            is_refused = row.status == REFUSED
            for number, value in enumerate(
                (
                    0 if is_refused else row.num_requests,
                    row.num_requests if is_refused else 0,
                    row.num_prompt_tokens,
                    row.num_completion_tokens,
                    row.total_s,
                )
            ):
                sum_[number] += value
        statement, table = _insert_of(connection)(usage_days), usage_days.c
        statement = statement.on_conflict_do_update(
            index_elements=_KEY, set_={name: table[name] + statement.excluded[name] for name in _COUNTS}
        )
        named = (*_KEY, *_COUNTS)
        # Sorted, so that two servers cannot deadlock.
        connection.execute(
            statement, [dict(zip(named, (*key, *counts), strict=True)) for key, counts in sorted(sums.items())]
        )


def _without_nul(row: RequestRow) -> RequestRow:
    """A model may generate NUL characters. Prompts have none."""
    if row.answer is None or "\0" not in row.answer:
        return row
    return msgspec.structs.replace(row, answer=clean(row.answer))


def _known(connection: Connection, ids: Sequence[str]) -> set[str]:
    given = {"ids": msgspec.json.encode(ids).decode()}
    return set(connection.execute(_select_known(connection.dialect.name), given).scalars())


@cache
def _select_known(dialect: str) -> TextClause:
    """Return the statement that selects those of `:ids`, a JSON array, that are in the table. A parameter for each id
    would make SQLAlchemy write a long statement for each transaction."""
    ids = "value FROM json_each(:ids)"
    if dialect == "postgresql":
        ids = "json_array_elements_text(CAST(:ids AS json))"
    return text(f"SELECT request_id FROM requests WHERE request_id IN (SELECT {ids})")  # noqa: S608 - text of this function


def _insert_text(connection: Connection) -> str:
    """Return the statement that adds one row, with the driver's placeholders."""
    columns = RequestRow.__struct_fields__
    values = ["?" if connection.dialect.paramstyle == "qmark" else "%s"] * len(columns)
    names = f"INSERT INTO requests ({', '.join(columns)}) VALUES ({', '.join(values)})"  # noqa: S608 - names of this module
    return f"{names} ON CONFLICT DO NOTHING"


def _insert_of(
    connection: Connection,
) -> Any:  # Any: the two dialects have no common type with `on_conflict_do_nothing`
    return postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert


def _usage(row: Any) -> UsageSum:  # Any: a mapping of the selected columns
    named = {name: row[name] for name in ("owner", "key_id", "model", "wire") if name in row}
    start_s = int(row["day"]) if "day" in row else None
    num_requests, num_refused, num_prompt_tokens, num_completion_tokens = (int(row[name]) for name in _COUNTS[:-1])
    return UsageSum(
        num_requests,
        num_refused,
        num_prompt_tokens,
        num_completion_tokens,
        float(row["total_s"]),
        start_s=start_s,
        **named,
    )


def _spent(connection: Connection, kind: str, name: str, period: str, since_s: float) -> Iterator[Spending]:
    """Sum the table of days for a month, and the rows for a minute."""
    table, start = (usage_days, usage_days.c.day) if period == "month" else (requests, requests.c.created_s)
    num_requests = func.sum(table.c.num_requests)
    tokens = func.sum(table.c.num_prompt_tokens + table.c.num_completion_tokens)
    query = select(table.c[name], num_requests, tokens).where(start >= since_s, table.c.key_id != "")
    if period == "minute":
        query = query.where(table.c.status != REFUSED)
    for account, count, num_tokens in connection.execute(query.group_by(table.c[name])):
        yield Spending((kind, account), period, int(count), int(num_tokens))
