"""Keys for tests."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.records.databases import with_tables

from tailrace.access.keys import DEFAULT_SCOPES
from tailrace.records.records_service import Records
from tailrace.settings import Settings

__all__ = ["key_of"]


def key_of(database: str, owner: str, *scopes: str) -> str:
    """Create a key in a database before its server starts. tests/admin/test_keys_command.py uses the command."""
    if database.startswith("sqlite:///"):
        with_tables(Path(database.removeprefix("sqlite:///")))
    with contextlib.closing(Records(Settings(database=database))) as records:
        return records.keys().create(owner, scopes=scopes or DEFAULT_SCOPES).token
