"""Rows and their sums, on each kind of database."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from sqlalchemy import func, select

from tailrace.access.quotas import Spending
from tailrace.records.database_tables import requests, usage_days
from tailrace.records.key_store import KeyStore
from tailrace.records.record_database import RecordDatabase
from tailrace.records.request_rows import RequestRow
from tailrace.records.request_store import RequestStore

_NOON_S = datetime(2026, 11, 23, 12, 0, 20, tzinfo=UTC).timestamp()
_DAY_S = 86_400.0


@pytest.fixture
def store(database: RecordDatabase) -> RequestStore:
    return RequestStore(database)


def _row(name: str, created_s: float = _NOON_S, owner: str = "alice", **values: object) -> RequestRow:
    return msgspec.convert(
        {"request_id": name, "created_s": created_s, "owner": owner, "key_id": f"{owner}1", "model": "m"}
        | {"wire": "openai", "status": "done", "num_prompt_tokens": 3, "num_completion_tokens": 7, "total_s": 0.5}
        | values,
        RequestRow,
    )


def _refused(name: str, count: int = 1) -> RequestRow:
    values: dict[str, Any] = {"num_prompt_tokens": 0, "num_completion_tokens": 0, "total_s": 0.0, "num_choices": 0}
    return _row(name, status="refused", finish="overloaded", num_requests=count, **values)  # Any: of each type


def test_rows_are_read_unchanged(store: RequestStore) -> None:
    rows = [_row("a", prompt="Grüße 👋", answer="x" * 100_000, queue_s=0.25), _row("b", _NOON_S + 1), _refused("c")]
    store.add(rows)
    assert sorted(store.rows(), key=lambda row: row.request_id) == rows
    assert [row.request_id for row in store.rows(since_s=_NOON_S + 0.5)] == ["b"]
    assert {row.request_id for row in store.rows(until_s=_NOON_S + 0.5)} == {"a", "c"}
    assert list(store.rows(owner="bob")) == []


def test_an_answer_with_nul_is_stored(store: RequestStore) -> None:
    store.add([_row("a", answer="one\0two \\u0000"), _row("b")])
    assert [row.answer for row in store.rows()] == ["one\ufffdtwo \\u0000", None]


def test_a_deleted_owner_gets_no_rows_and_no_sums(store: RequestStore, database: RecordDatabase) -> None:
    keys = KeyStore(database)
    key_ids = {owner: keys.create(owner).key.key_id for owner in ("alice", "bob")}
    keys.forget("alice")
    store.add([_row(owner, owner=owner, key_id=key_ids[owner]) for owner in ("alice", "bob")])
    assert [row.request_id for row in store.rows()] == ["bob"]
    assert [usage.owner for usage in store.usage(by=("owner",))] == ["bob"]


def test_a_repeated_row_counts_once(store: RequestStore) -> None:
    store.add([_row("a"), _row("a"), _row("b")])
    store.add([_row("b"), _row("c")])
    (usage,) = store.usage()
    assert (usage.num_requests, usage.num_prompt_tokens, usage.num_completion_tokens) == (3, 9, 21)
    assert len(list(store.rows())) == 3


def test_many_pages(store: RequestStore) -> None:
    store.add([_row(f"r{number:05}", _NOON_S + number % 7) for number in range(2_500)])
    found = list(store.rows())
    assert len({row.request_id for row in found}) == 2_500
    assert [row.created_s for row in found] == sorted(row.created_s for row in found)


def test_sums(store: RequestStore) -> None:
    store.add(
        [_row("a"), _row("b", _NOON_S + 3600), _row("c", _NOON_S + _DAY_S, "bob"), _refused("d", 5)]
    )  # fmt: skip
    (total,) = store.usage()
    assert (total.num_requests, total.num_refused, total.total_s) == (3, 5, 1.5)
    by_owner = {one.owner: one.num_requests for one in store.usage(by=["owner"])}
    assert by_owner == {"alice": 2, "bob": 1}
    days = [(one.owner, one.start_s, one.num_requests) for one in store.usage(by=["owner", "day"])]
    midnight = int(_NOON_S // 86_400 * 86_400)
    assert days == [("alice", midnight, 2), ("bob", midnight + 86_400, 1)]
    assert [one.num_requests for one in store.usage(by=["day"], owner="alice")] == [2]
    assert [one.key_id for one in store.usage(by=["key_id", "model", "wire"], key_id="bob1")] == ["bob1"]
    assert store.usage(since_s=_NOON_S + 2 * _DAY_S) == []
    (early,) = store.usage(until_s=_NOON_S + 1)
    assert early.num_requests == 2  # whole days


def test_usage_of_this_month_and_this_minute(store: RequestStore) -> None:
    store.add([
        _row("a"), _row("b", _NOON_S - 25), _row("c", _NOON_S - 40 * 86_400), _refused("d"), _row("e", key_id=""),
    ])  # fmt: skip
    spent = set(store.spent(_NOON_S + 5))
    assert {Spending(("key", "alice1"), "minute", 1, 10), Spending(("key", "alice1"), "month", 2, 20)} <= spent
    assert {Spending(("owner", "alice"), "minute", 1, 10), Spending(("owner", "alice"), "month", 2, 20)} <= spent
    assert len(spent) == 4


def test_old_rows_are_deleted_and_sums_kept(store: RequestStore) -> None:
    store.add([_row("a"), _row("b", _NOON_S + 100)])
    assert store.delete_before(_NOON_S + 50) == 1
    assert [row.request_id for row in store.rows()] == ["b"]
    assert store.usage()[0].num_requests == 2


def test_an_owner_is_deleted(store: RequestStore, database: RecordDatabase) -> None:
    store.add([_row("a"), _row("b"), _row("c", owner="bob")])
    assert store.forget("alice") == 2
    with database.begin() as connection:
        for table in (requests, usage_days):
            assert connection.execute(select(func.count()).where(table.c.owner == "alice")).scalar() == 0
    assert {one.owner for one in store.usage(by=["owner"])} == {"bob"}


def test_servers_add_concurrently(store: RequestStore) -> None:
    """No row is lost or counted twice, and no server waits forever."""
    owners = ["alice", "bob", "carol"]

    def add(server: int) -> None:
        for turn in range(10):
            rows = [_row(f"{server}.{turn}.{number}", owner=owners[number % 3]) for number in range(9)]
            store.add(rows if server % 2 else rows[::-1])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, range(4)))
    assert len(list(store.rows())) == 4 * 90
    assert store.usage()[0].num_requests == 4 * 90
