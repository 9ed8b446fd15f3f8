"""`tailrace usage`, and limits on the command line."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
from tests.api.forks import run_text
from tests.api.process import TAILRACE, environment

from tailrace.access.quota import Quota
from tailrace.records.key_store import KeyStore
from tailrace.records.record_database import RecordDatabase
from tailrace.records.request_rows import RequestRow
from tailrace.records.request_store import RequestStore


def _tailrace(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_text([TAILRACE, *words, "--database", f"sqlite:///{directory / 'records.sqlite'}"], environment())


@pytest.fixture
def database(tmp_path: Path) -> RecordDatabase:
    made = RecordDatabase(f"sqlite:///{tmp_path / 'records.sqlite'}")
    made.prepare()
    return made


def _row(name: str, owner: str, *, age_s: float = 0.0, **values: object) -> RequestRow:
    row = {"request_id": name, "created_s": time.time() - age_s, "owner": owner, "key_id": "k", "model": "=m"}
    row |= {"wire": "openai", "status": "done", "num_prompt_tokens": 1000, "num_completion_tokens": 234}
    return msgspec.convert(row | values, RequestRow)


def test_sums_and_rows_in_each_form(tmp_path: Path, database: RecordDatabase) -> None:
    RequestStore(database).add(
        [_row("a", "alice"), _row("b", "alice", prompt="two\nlines"), _row("c", "bob", age_s=90 * 86_400)]
    )  # fmt: skip
    shown = _tailrace(tmp_path, "usage", "--since", "1d")
    assert shown.returncode == 0, shown.stderr
    (line,) = [line.split() for line in shown.stdout.splitlines() if "alice" in line]
    assert line == ["alice", "2", "0", "2,000", "468", "0"]
    assert "bob" not in shown.stdout
    as_json = _tailrace(tmp_path, "usage", "--since", "1y", "--by", "owner", "--by", "model", "--format", "json")
    assert [json.loads(line)["owner"] for line in as_json.stdout.splitlines()] == ["alice", "bob"]
    rows = list(csv.DictReader(io.StringIO(_tailrace(tmp_path, "usage", "--since", "1d", "--requests").stdout)))
    assert [(row["request_id"], row["prompt"], row["model"]) for row in rows] == [
        ("a", "", "'=m"), ("b", "two\nlines", "'=m"),  # a spreadsheet would run it
    ]  # fmt: skip
    nothing = _tailrace(tmp_path, "usage", "--owner", "carol")
    assert "There were no requests" in nothing.stdout + nothing.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("usage", "--since", "tomorrow"), "is not a date"),
        (("usage", "--by", "name"), "owner"),
        (("usage", "--requests", "--format", "table"), "csv and json"),
        (("usage", "--requests", "--by", "day"), "--by cannot group"),
        (("usage",), "There is no database at"),
        (("keys", "limit", "--tokens-per-minute", "5"), "either a key's id or --owner"),
        (("keys", "limit", "abcdefghjkmn", "--tokens-per-minute", "5"), "There are no keys: there is no database at"),
        (("keys", "limit", "--owner", "a b", "--tokens-per-minute", "5"), "owner's name"),
        (("keys", "limit", "--owner", "alice", "--tokens-per-minute", "0"), "a number from 1"),
        (("keys", "create", "alice", "--streams-at-once", "many"), "a number from 1"),
        (("keys", "create", "alice", "--tokens-per-month", "9" * 5000), "to 1000000000000000, or none"),
    ],
)
def test_mistakes(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    ended = _tailrace(tmp_path, *words)
    assert ended.returncode != 0
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_usage_creates_no_database(tmp_path: Path) -> None:
    """A server records requests as soon as there is one."""
    _tailrace(tmp_path, "usage")
    assert list(tmp_path.iterdir()) == []


def test_limits_are_set_changed_and_removed(tmp_path: Path, database: RecordDatabase) -> None:
    made = _tailrace(tmp_path, "keys", "create", "alice", "--tokens-per-minute", "500", "--json")
    key_id = json.loads(made.stdout)["id"]
    store = KeyStore(database)
    assert store.get(key_id).quota == Quota(tokens_per_minute=500)
    shown = _tailrace(tmp_path, "keys", "limit", key_id, "--tokens-per-minute", "none", "--streams-at-once", "2")
    assert "streams at once 2" in shown.stdout
    assert store.get(key_id).quota == Quota(streams_at_once=2)
    for _ in range(2):  # once to make it, once to change it
        ended = _tailrace(tmp_path, "keys", "limit", "--owner", "alice", "--requests-per-month", "9")
        assert ended.returncode == 0, ended.stderr
    assert store.quota_of("alice") == Quota(requests_per_month=9)
