"""Keys in the database, and the keyring that reads them."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import event, text
from starlette.datastructures import Headers
from tests.waiting import LONG_S

from tailrace.access.authentication import Authentication
from tailrace.access.keyring import Keyring
from tailrace.access.keys import Key
from tailrace.access.principal import Principal
from tailrace.access.quota import NO_LIMITS, Quota
from tailrace.access.sessions import Sessions
from tailrace.errors import ModelError, Unauthenticated, UnknownKey
from tailrace.records.database_tables import keys
from tailrace.records.key_store import KeyStore, find_forgotten, next_version
from tailrace.records.record_database import RecordDatabase
from tailrace.records.records_service import has_keys, open_database, open_records
from tailrace.settings import Settings


@pytest.fixture
def store(database: RecordDatabase) -> KeyStore:
    return KeyStore(database)


def _show(keyring: Keyring, token: str) -> Principal:
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b""}
    return Authentication(keyring, Sessions()).authenticate(scope, Headers({"authorization": f"Bearer {token}"}))


def _keyring(store: KeyStore) -> Keyring:
    keyring = Keyring()
    keyring.update(store.changed_since(0).keys)
    return keyring


def test_a_key_is_kept_without_its_secret(store: KeyStore, database: RecordDatabase) -> None:
    made = store.create("alice", name="laptop", scopes=("read", "wire:openai"))
    assert store.get(made.key.key_id) == made.key
    assert _show(_keyring(store), made.token) == Principal("alice", made.key.key_id, ("read", "wire:openai"))
    secret = made.token.split("_", 2)[2].encode()  # it may have a _ itself
    with database.begin() as connection:
        row = connection.execute(keys.select()).one()
    assert all(secret not in str(value).encode() for value in row)


def test_revoked(store: KeyStore) -> None:
    one, other = store.create("alice"), store.create("bob")
    revoked = store.revoke(one.key.key_id)
    assert revoked.state(time.time()) == "revoked"
    assert store.revoke(one.key.key_id) == revoked
    keyring = _keyring(store)
    assert _show(keyring, other.token).owner == "bob"
    with pytest.raises(Unauthenticated):
        _show(keyring, one.token)
    with pytest.raises(ValueError, match="revoked"):
        store.rotate(one.key.key_id, grace_s=0)


def test_rotated(store: KeyStore) -> None:
    made = store.create("alice")
    turned = store.rotate(made.key.key_id, grace_s=60)
    keyring = _keyring(store)
    assert _show(keyring, made.token) == _show(keyring, turned.token)
    last = store.rotate(made.key.key_id, grace_s=0)
    keyring = _keyring(store)
    assert _show(keyring, last.token).key_id == made.key.key_id
    for token in (made.token, turned.token):
        with pytest.raises(Unauthenticated):
            _show(keyring, token)


def test_expired(store: KeyStore) -> None:
    made = store.create("alice", lifetime_s=-1)
    assert made.key.state(time.time()) == "expired"
    with pytest.raises(Unauthenticated):
        _show(_keyring(store), made.token)


def test_unknown(store: KeyStore) -> None:
    for call in (store.get, store.revoke, lambda key_id: store.rotate(key_id, grace_s=1)):
        with pytest.raises(UnknownKey):
            call("abcdefghjkmn")


@pytest.mark.parametrize("owner", ["", "anonymous", "a b", "x\0y", "a" * 201, "a\n"])
def test_invalid_names_of_owners(store: KeyStore, owner: str) -> None:
    with pytest.raises(ValueError, match="owner"):
        store.create(owner)
    assert store.list() == []


@pytest.mark.parametrize("scopes", [("root",), (), ("wire:openai",), ("read", "wire:"), ("read", "model:a b")])
def test_invalid_scopes(store: KeyStore, scopes: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="scope"):
        store.create("alice", scopes=scopes)


def test_listed(store: KeyStore) -> None:
    made = [store.create(owner).key for owner in ("alice", "bob", "alice")]
    assert {key.key_id for key in store.list()} == {key.key_id for key in made}
    assert {key.owner for key in store.list("alice")} == {"alice"}
    assert store.forget("alice") == 2
    assert store.forget("alice") == 0
    assert [key.owner for key in store.list()] == ["bob"]


def test_changes_of_any_server_are_seen(store: KeyStore) -> None:
    """Versions become visible in order, also if many threads change keys at the same time."""
    seen, known = 0, set[str]()
    with ThreadPoolExecutor(6) as threads:
        making = [threads.submit(store.create, f"owner{number}") for number in range(40)]
        while not all(one.done() for one in making):
            changes = store.changed_since(seen)
            known, seen = known | {key.key_id for key in changes.keys}, changes.version
    changes = store.changed_since(seen)
    known |= {key.key_id for key in changes.keys}
    assert known == {one.result().key.key_id for one in making}
    assert changes.version == 40


@pytest.mark.parametrize("num_queries", [1, 2, 3])
def test_a_change_between_two_queries_of_a_reader_is_not_missed(
    database: RecordDatabase, store: KeyStore, url: str, num_queries: int
) -> None:
    """In PostgreSQL, each query of the reader sees the database as it is at that moment."""
    key_id = store.create("alice").key.key_id
    seen = store.changed_since(0).version
    store.limit_owner("carol", Quota(requests_per_minute=1))
    before = iter(range(num_queries))
    writer = RecordDatabase(url)

    def change(connection: object, cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("SELECT") and next(before, None) == num_queries - 1:
            KeyStore(writer).revoke(key_id)
            KeyStore(writer).limit_owner("bob", Quota(requests_per_minute=1))

    event.listen(database.engine, "after_cursor_execute", change)
    known: dict[str, Key] = {}
    for _ in range(2):
        changes = store.changed_since(seen)
        seen = changes.version
        known |= {key.key_id: key for key in changes.keys}
    event.remove(database.engine, "after_cursor_execute", change)
    writer.close()
    assert known[key_id].revoked_s is not None


def test_changes_become_visible_in_the_order_of_their_versions(store: KeyStore, database: RecordDatabase) -> None:
    """A second writer waits for the first one, which may commit late."""
    with ThreadPoolExecutor(1) as thread:
        with database.begin() as connection:
            first = next_version(connection)
            second = thread.submit(store.limit_owner, "alice", NO_LIMITS)
            with pytest.raises(TimeoutError):
                second.result(timeout=0.3)
            assert store.changed_since(0).version == first - 1
        second.result(timeout=LONG_S)
    assert store.changed_since(0).version == first + 1


def test_a_database_that_was_restored_from_a_copy_is_read_again(store: KeyStore) -> None:
    store.create("alice")
    changes = store.changed_since(1_000)
    assert [key.owner for key in changes.keys] == ["alice"]
    assert changes.version == 1


def test_a_server_that_was_away_learns_that_a_forgotten_key_is_revoked(store: KeyStore) -> None:
    made = store.create("alice", name="laptop")
    keyring, revoked = _keyring(store), list[str]()
    keyring.on_revoked(revoked.append)
    seen = store.changed_since(0).version
    store.revoke(made.key.key_id)
    store.forget("alice")
    changed = store.changed_since(seen).keys
    keyring.update(changed)
    assert revoked == [made.key.key_id]
    assert all(word not in str(key) for key in changed for word in ("alice", "laptop", str(made.key.secret_hash)))
    with pytest.raises(Unauthenticated):
        _show(keyring, made.token)


def test_a_deletion_waits_for_changes_that_found_the_key(store: KeyStore, database: RecordDatabase) -> None:
    """So it also deletes what they add."""
    alice, bob = store.create("alice").key, store.create("bob").key
    with ThreadPoolExecutor(1) as thread:
        with database.begin() as connection:
            assert find_forgotten(connection, [alice.key_id, bob.key_id, "unknown", ""]) == set()
            deletion = thread.submit(store.forget, "alice")
            with pytest.raises(TimeoutError):
                deletion.result(timeout=0.3)
        assert deletion.result(timeout=LONG_S) == 1
    with database.begin() as connection:
        assert find_forgotten(connection, [bob.key_id, alice.key_id]) == {alice.key_id}


def test_a_server_whose_last_owner_was_forgotten_stays_closed(url: str, store: KeyStore) -> None:
    made = store.create("alice")
    store.forget("alice")
    assert store.list() == []
    assert not _keyring(store).is_empty
    assert has_keys(Settings(database=url))
    for call in (store.get, store.revoke, lambda key_id: store.rotate(key_id, grace_s=0)):
        with pytest.raises(UnknownKey):
            call(made.key.key_id)


async def test_a_keyring_reads_changes(url: str) -> None:
    async with open_records(Settings(database=url)) as records:
        revoked = asyncio.Queue[str]()
        records.keyring.on_revoked(revoked.put_nowait)
        # Somebody else, as `tailrace keys` is.
        database = await asyncio.to_thread(open_database, Settings(database=url))
        store = KeyStore(database)
        made = await asyncio.to_thread(store.create, "alice")
        async with asyncio.timeout(LONG_S):
            while records.keyring.is_empty:
                await asyncio.sleep(0.01)
            assert _show(records.keyring, made.token).owner == "alice"
            await asyncio.to_thread(store.revoke, made.key.key_id)
            assert await revoked.get() == made.key.key_id
        database.close()
        assert not records.keyring.is_empty


async def test_a_server_without_keys_creates_no_database(tmp_path: Path) -> None:
    async with open_records(Settings(database=f"sqlite:///{tmp_path / 'records.sqlite'}")) as records:
        await records.read_keys()
    assert not list(tmp_path.iterdir())


def test_looking_for_keys_changes_nothing(url: str, store: KeyStore, database: RecordDatabase) -> None:
    settings = Settings(database=url)
    assert not has_keys(settings)
    store.create("alice")
    assert has_keys(settings)
    database.migrate("0001")
    assert has_keys(settings)
    with database.engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "0001"
    database.migrate("base")
    assert not has_keys(settings)


@pytest.mark.parametrize("form", ["sqlite:///{}", "sqlite+pysqlite:///{}", "sqlite:///{}?timeout=20"])
async def test_the_keys_of_every_form_of_url_are_read(tmp_path: Path, form: str) -> None:
    """Otherwise the server would be open."""
    settings = Settings(database=form.format(tmp_path / "records.sqlite"))
    assert not has_keys(settings)
    assert not list(tmp_path.iterdir())
    database = await asyncio.to_thread(open_database, settings)
    await asyncio.to_thread(KeyStore(database).create, "alice")
    database.close()
    assert has_keys(settings)
    async with open_records(settings) as records:
        assert not records.keyring.is_empty


async def test_a_server_whose_keys_cannot_be_read_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "records.sqlite").write_bytes(b"not a database, and longer than a header would be" * 40)
    with pytest.raises(ModelError, match="cannot be used"):
        async with open_records(Settings(database=f"sqlite:///{tmp_path / 'records.sqlite'}")):
            pass


def test_nul_characters(store: KeyStore) -> None:
    """PostgreSQL refuses them in text. This must not look like an unreachable database, which clients try again."""
    for call in (store.get, store.revoke, lambda key_id: store.rotate(key_id, grace_s=0)):
        with pytest.raises(UnknownKey):
            call("a\0")
    with pytest.raises(ValueError, match="NUL"):
        store.create("alice", name="a\0")
    for of_owner in (store.list, store.quota_of, store.create):
        with pytest.raises(ValueError, match="owner's name"):
            of_owner("a\0")
