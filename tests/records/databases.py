"""Databases for tests, of each supported kind."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

__all__ = ["KINDS", "own_database"]

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
