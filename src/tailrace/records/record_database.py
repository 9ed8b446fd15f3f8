"""Open the database, and migrate it to this version's tables."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError

from tailrace.errors import ModelError, StorageError
from tailrace.packages.requirements import install_command
from tailrace.records.threads import TOO_SLOW, UNREACHABLE
from tailrace.system.file_systems import NEEDS_LOCAL_DISK, lacks_locks, warn_of_network
from tailrace.system.owners import create_file, make_directory

__all__ = ["HEAD", "RecordDatabase", "struct_of"]

logger = logging.getLogger("tailrace.records")

HEAD = "0008"  # the newest migration
STATEMENT_S = 10.0
LONG_STATEMENT_S = 600.0  # of deletions and migrations
_BUSY_S = 10.0  # for a lock of SQLite
_StructT = TypeVar("_StructT", bound=msgspec.Struct)
_URL_HINT = "--database takes a URL such as sqlite:///records.sqlite or postgresql://user@host/name."


class RecordDatabase:
    """A connection pool. Calls block, so a server makes them in threads.

    Raises: ModelError for a URL that cannot be used. The message never has the password.
    """

    def __init__(self, url: str) -> None:
        self.engine = _engine(url)
        self._is_postgresql = self.engine.dialect.name == "postgresql"

    def prepare(self) -> None:
        """Create the tables, or migrate them to this version. Raises: ModelError."""
        with self._as_model_errors():
            with self.engine.connect() as connection:
                found = _version(connection)
            if found != HEAD:
                self.migrate()

    def has_keys(self) -> bool:
        """Return whether there are keys, also in tables of another version. Changes nothing. Raises: ModelError."""
        with self._as_model_errors(), self.engine.connect() as connection:
            is_there = inspect(connection).has_table("keys")
            return is_there and connection.execute(text("SELECT 1 FROM keys LIMIT 1")).first() is not None

    def migrate(self, revision: str = "head") -> None:
        """Migrate up or down to a revision, in one transaction. Raises: ModelError."""
        from alembic import command
        from alembic.config import Config
        from alembic.script import ScriptDirectory
        from alembic.util import CommandError

        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        with self._as_model_errors(), self.engine.connect() as connection:
            if connection.dialect.name == "sqlite":
                # A second server waits here, and then finds nothing to do.
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            else:
                _limit(connection, LONG_STATEMENT_S)
                connection.execute(text("SELECT pg_advisory_xact_lock(7218412935)"))
            found = _version(connection)
            known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
            if found is not None and found not in known:
                raise ModelError(
                    "The database was made by a newer version of tailrace. Install it, or choose another --database."
                )
            config.attributes["connection"] = connection
            try:
                if revision == "base" or (revision != "head" and (found or "") > revision):
                    command.downgrade(config, revision)
                else:
                    command.upgrade(config, revision)
            except CommandError as error:
                raise ModelError(f"The database cannot be migrated: {error}") from None
            connection.commit()

    @contextlib.contextmanager
    def begin(self, *, is_long: bool = False) -> Iterator[Connection]:
        """Run the block in a transaction. Each statement may take ten seconds, with `is_long` ten minutes.

        Raises: StorageError if the database is unreachable, refuses, or does not answer in time. Then nothing is
        written, unless the reply to the commit itself was lost.
        """
        try:
            with self.engine.begin() as connection:
                if self._is_postgresql:
                    _limit(connection, LONG_STATEMENT_S if is_long else STATEMENT_S)
                yield connection
        except SQLAlchemyError as error:
            logger.debug("the database: %s", error)
            message = TOO_SLOW if self._is_late(error) else UNREACHABLE
            raise StorageError(message) from None

    def close(self) -> None:
        self.engine.dispose()

    def _is_late(self, error: SQLAlchemyError) -> bool:
        """Return whether something took too long."""
        reason = getattr(error, "orig", None)
        if not self._is_postgresql:
            return _is_locked(reason)
        from tailrace.records.postgresql import is_late

        return is_late(reason)

    @contextlib.contextmanager
    def _as_model_errors(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            where = self.engine.url.render_as_string(hide_password=True)
            reason = getattr(error, "orig", None)
            why = str(reason or error).strip().splitlines()[0]
            why = f"{why}. {NEEDS_LOCAL_DISK}" if lacks_locks(reason) else why
            raise ModelError(f"The database {where} cannot be used: {why}") from None


def _limit(connection: Connection, statement_s: float) -> None:
    from tailrace.records.postgresql import limit_transaction

    limit_transaction(connection, statement_s)


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _engine(given: str) -> Engine:
    try:
        url = make_url(given)
    except ArgumentError:
        raise ModelError(_URL_HINT) from None
    backend = url.get_backend_name()
    if backend not in ("sqlite", "postgresql", "postgres"):
        raise ModelError(_URL_HINT)
    try:
        if backend == "sqlite":
            return _sqlite(url.set(drivername="sqlite"))
        return _postgresql(url.set(drivername="postgresql+psycopg"))  # whatever driver the URL names
    except ImportError:
        command = install_command(extra="postgresql")
        raise ModelError(f"The driver of PostgreSQL is not installed. Run: {command}") from None
    except (OSError, OperationalError) as error:
        raise ModelError(f"The database cannot be opened: {error}") from None


def _sqlite(url: URL) -> Engine:
    if url.database and url.database != ":memory:":
        path = Path(url.database)
        make_directory(path.parent)
        warn_of_network(path)
        create_file(path)  # it has hashes of keys, and texts of conversations
    engine = create_engine(url, connect_args={"timeout": _BUSY_S})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, record: object) -> None:  # Any: of the driver
        _use_wal(connection)
        for pragma in ("synchronous=NORMAL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    return engine


def _is_locked(error: object) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch a new file to a write-ahead log. Where several servers do it at once, SQLite refuses without waiting."""
    until_s = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if not _is_locked(error) or time.monotonic() > until_s:
                raise
            time.sleep(0.01)
        else:
            return


def _postgresql(url: URL) -> Engine:
    from tailrace.records.postgresql import postgresql_engine

    return postgresql_engine(url, reply_s=STATEMENT_S / 2)


def struct_of(kind: type[_StructT], row: Any) -> _StructT:  # Any: a row of a table
    """Return a row whose columns are named like the fields of a struct."""
    return kind(**{name: getattr(row, name) for name in kind.__struct_fields__})
