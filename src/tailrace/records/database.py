"""Open the database, and migrate it to this version's tables."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, OperationalError, SQLAlchemyError

from tailrace.errors import ModelError, StorageError
from tailrace.records.threads import UNREACHABLE
from tailrace.requirements import install_command

__all__ = ["HEAD", "RecordDatabase"]

logger = logging.getLogger("tailrace.records")

HEAD = "0006"  # the newest migration
_BUSY_S = 15.0
_CONNECT_S = 5
_URL_HINT = "--database takes a URL such as sqlite:///records.sqlite or postgresql+psycopg://user@host/name."


class RecordDatabase:
    """A connection pool. Calls block, so a server makes them in threads.

    Raises: ModelError for a URL that cannot be used. The message never has the password.
    """

    def __init__(self, url: str) -> None:
        self.engine = _engine(url)

    def prepare(self) -> None:
        """Create the tables, or migrate them to this version. Raises: ModelError."""
        with self._as_model_errors():
            with self.engine.connect() as connection:
                found = _version(connection)
            if found != HEAD:
                self.migrate()

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
    def begin(self) -> Iterator[Connection]:
        """Run the block in a transaction. Raises: StorageError if the database is unreachable or refuses."""
        try:
            with self.engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            logger.debug("the database: %s", error)
            raise StorageError(UNREACHABLE, retry_after_s=1.0) from None

    def close(self) -> None:
        self.engine.dispose()

    @contextlib.contextmanager
    def _as_model_errors(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            where = self.engine.url.render_as_string(hide_password=True)
            why = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
            raise ModelError(f"The database {where} cannot be used: {why}") from None


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _engine(given: str) -> Engine:
    try:
        url = make_url(given)
    except ArgumentError:
        raise ModelError(_URL_HINT) from None
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise ModelError(_URL_HINT)
    try:
        return _sqlite(url) if url.get_backend_name() == "sqlite" else _postgresql(url)
    except (ImportError, NoSuchModuleError):
        raise ModelError(
            f"The driver of {url.drivername} is not installed. For PostgreSQL write postgresql+psycopg://…, and run: "
            f"{install_command(extra='postgresql')}"
        ) from None
    except (OSError, OperationalError) as error:
        raise ModelError(f"The database cannot be opened: {error}") from None


def _sqlite(url: URL) -> Engine:
    if url.database and url.database != ":memory:":
        path = Path(url.database)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # the file has hashes of keys, and texts of conversations
    engine = create_engine(url, connect_args={"timeout": _BUSY_S})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, record: object) -> None:  # Any: of the driver
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    return engine


def _postgresql(url: URL) -> Engine:
    limits = {"connect_timeout": _CONNECT_S, "tcp_user_timeout": 1000 * _CONNECT_S}  # the latter in ms
    return create_engine(url, pool_pre_ping=True, connect_args=limits)
