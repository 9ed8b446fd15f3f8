"""The tables and their migrations, on each kind of database."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text
from tests.records.databases import own_database
from tests.records.pgbouncer import in_front_of

import tailrace.records
from tailrace.errors import ModelError
from tailrace.records.conversation_store import ConversationStore
from tailrace.records.database_tables import METADATA
from tailrace.records.key_store import KeyStore
from tailrace.records.record_database import HEAD, RecordDatabase


def test_the_migrations_make_the_tables(database: RecordDatabase) -> None:
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []


def test_the_newest_migration_is_known_by_name() -> None:
    assert tailrace.records.__file__ is not None
    scripts = ScriptDirectory(str(Path(tailrace.records.__file__).parent / "migrations"))
    assert scripts.get_current_head() == HEAD


def test_downgrade_and_upgrade(database: RecordDatabase) -> None:
    database.migrate("base")
    with database.engine.connect() as connection:
        assert set(inspect(connection).get_table_names()) <= {"alembic_version"}
    database.prepare()
    with database.engine.connect() as connection:
        assert set(METADATA.tables) <= set(inspect(connection).get_table_names())


def test_two_servers_prepare_at_once(url: str) -> None:
    def prepare(_: int) -> None:
        with closing(RecordDatabase(url)) as database:
            database.prepare()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(prepare, range(4)))
    with closing(RecordDatabase(url)) as database, database.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM key_changes")).scalar() == 1


def test_a_database_of_a_later_version_is_left_alone(database: RecordDatabase) -> None:
    with database.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ModelError, match="newer version"):
        database.prepare()
    with database.begin() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9999"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("not a url", "takes a URL"),
        ("mysql://root@localhost/test", "takes a URL"),
        ("postgresql+psycopg://me:hunter2@127.0.0.1:1/x", "cannot be used"),
        ("postgres://me:hunter2@127.0.0.1:1/x", "cannot be used"),
        ("sqlite:////proc/none/records.sqlite", "cannot be opened"),
    ],
)
def test_unusable_databases_are_refused_without_the_password(url: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as refused:
        RecordDatabase(url).prepare()
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg2"])
def test_every_form_of_a_url_of_postgresql(scheme: str, tmp_path: Path) -> None:
    with own_database("postgresql", tmp_path) as url:
        given = url.replace("postgresql+psycopg", scheme)
        with closing(RecordDatabase(given)) as opened:
            opened.prepare()
            assert not opened.has_keys()


def test_a_file_that_is_not_a_database(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_bytes(b"not a database, and longer than a header would be" * 40)
    with pytest.raises(ModelError, match="cannot be used"):
        RecordDatabase(f"sqlite:///{tmp_path / 'x.sqlite'}").prepare()
    assert (tmp_path / "x.sqlite").read_bytes().startswith(b"not a database")


def test_only_the_user_can_read_the_file(tmp_path: Path) -> None:
    with closing(RecordDatabase(f"sqlite:///{tmp_path / 'x.sqlite'}")) as database:
        database.prepare()
    assert (tmp_path / "x.sqlite").stat().st_mode & 0o077 == 0


def test_pgbouncer_may_give_each_transaction_to_another_connection(tmp_path: Path) -> None:
    """Prepared statements and settings of a connection would be found by other clients, or not at all."""
    with (
        own_database("postgresql", tmp_path) as direct,
        in_front_of(direct) as url,
        closing(RecordDatabase(url)) as opened,
    ):
        opened.prepare()
        keys, conversations = KeyStore(opened), ConversationStore(opened)

        def use(owner: str) -> int:
            keys.create(owner)
            conversations.create(owner)
            return len(conversations.ids(owner)) + len(keys.changed_since(0).keys)

        with ThreadPoolExecutor(8) as threads:
            used = list(threads.map(use, [f"owner{number}" for number in range(120)]))
        assert len(used) == len(keys.list()) == 120
        with opened.engine.connect() as connection:
            assert connection.execute(text("SHOW statement_timeout")).scalar() == "0"
