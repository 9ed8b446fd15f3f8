"""Databases for tests, of each supported kind."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from tailrace.records.record_database import RecordDatabase

__all__ = ["KINDS", "own_database", "with_tables"]

KINDS = ("sqlite", "postgresql")

_SERVER = os.environ.get("TAILRACE_TEST_POSTGRESQL", "postgresql+psycopg://postgres@127.0.0.1/postgres")


@contextlib.contextmanager
def own_database(kind: str, directory: Path) -> Iterator[str]:
    """The URL of an empty database. Skips the test where there is no PostgreSQL server."""
    if kind == "sqlite":
        yield f"sqlite:///{directory / 'own.sqlite'}"
        return
    server = create_engine(_SERVER, isolation_level="AUTOCOMMIT", connect_args={"connect_timeout": 3})
    name = f"tailrace_test_{secrets.token_hex(6)}"
    try:
        with server.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
    except OperationalError:
        pytest.skip("not on this machine: PostgreSQL on 127.0.0.1 (TAILRACE_TEST_POSTGRESQL names another)")
    try:
        yield server.url.set(database=name).render_as_string(hide_password=False)
    finally:
        with server.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
        server.dispose()


def with_tables(path: Path) -> str:
    """Make a SQLite database with the tables of this version and without rows, unless it exists. Return its URL.

    It is a copy: the steps that make the tables take a tenth of a second, and have their own tests.
    """
    if not path.exists():
        path.write_bytes(_new_sqlite())
    return f"sqlite:///{path}"


@cache
def _new_sqlite() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "records.sqlite"
        with contextlib.closing(RecordDatabase(f"sqlite:///{path}")) as database:
            database.prepare()
        return path.read_bytes()
