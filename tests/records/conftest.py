"""Each test runs on each kind of database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.records.databases import KINDS, own_database, with_tables

from tailrace.records.record_database import RecordDatabase


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with own_database(request.param, tmp_path) as made:
        yield made


@pytest.fixture
def database(url: str) -> Iterator[RecordDatabase]:
    if url.startswith("sqlite:///"):
        with_tables(Path(url.removeprefix("sqlite:///")))
    opened = RecordDatabase(url)
    opened.prepare()
    yield opened
    opened.close()
