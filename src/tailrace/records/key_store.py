"""Keys in the database."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, delete, insert, select, update

from tailrace.access.keys import DEFAULT_SCOPES, Key, NewKey, check_owner, new_key, rotated
from tailrace.access.quota import NO_LIMITS, Quota
from tailrace.access.sessions import Session
from tailrace.access.shares import Share
from tailrace.errors import UnknownKey
from tailrace.records.database_tables import key_changes, keys, owners, sessions, shares
from tailrace.records.record_database import RecordDatabase, struct_of

__all__ = ["Changes", "KeyStore", "find_forgotten", "next_version"]

_FORGOTTEN = "(deleted)"  # as the owner of a key; no owner can have this name


class Changes(msgspec.Struct, frozen=True):
    """What has changed after a version."""

    keys: Sequence[Key]
    owners: dict[str, Quota]
    sessions: Sequence[Session]
    shares: Sequence[Share]
    version: int  # all changes up to it are known


class KeyStore:
    """Creates, lists and changes keys. Calls block; each is one transaction. Raises: StorageError."""

    def __init__(self, database: RecordDatabase) -> None:
        self._database = database

    def create(
        self,
        owner: str,
        *,
        name: str = "",
        scopes: tuple[str, ...] = DEFAULT_SCOPES,
        lifetime_s: float | None = None,
        quota: Quota = NO_LIMITS,
    ) -> NewKey:
        """Raises: ValueError for an invalid owner, name or scope."""
        now_s = time.time()
        expires_s = now_s + lifetime_s if lifetime_s is not None else None
        made = new_key(owner, now_s=now_s, name=name, scopes=scopes, expires_s=expires_s, quota=quota)
        with self._database.begin() as connection:
            connection.execute(insert(keys).values(**_row(made.key), version=next_version(connection)))
        return made

    def list(self, owner: str | None = None) -> Sequence[Key]:
        """Return keys, the newest first. Raises: ValueError for an invalid owner."""
        query = select(keys).where(keys.c.owner != _FORGOTTEN).order_by(keys.c.created_s.desc(), keys.c.key_id)
        if owner is not None:
            query = query.where(keys.c.owner == check_owner(owner))
        with self._database.begin() as connection:
            return [_key(row) for row in connection.execute(query)]

    def get(self, key_id: str) -> Key:
        """Raises: UnknownKey."""
        with self._database.begin() as connection:
            return _existing(connection, key_id)

    def revoke(self, key_id: str) -> Key:
        """Revoke a key. Revoking it again changes nothing. Raises: UnknownKey."""
        with self._database.begin() as connection:
            version = next_version(connection)  # first, since this row is the lock of all writers
            key = _existing(connection, key_id)
            if key.revoked_s is None:
                key = msgspec.structs.replace(key, revoked_s=time.time())
                _save(connection, key, version)
        return key

    def rotate(self, key_id: str, *, grace_s: float) -> NewKey:
        """Give a key a new secret. The old one stays valid for `grace_s`. Raises: UnknownKey; ValueError for a revoked
        key."""
        with self._database.begin() as connection:
            version = next_version(connection)
            key = _existing(connection, key_id)
            if key.revoked_s is not None:
                raise ValueError("A revoked key cannot be rotated. Create a new key.")
            made = rotated(key, now_s=time.time(), grace_s=grace_s)
            _save(connection, made.key, version)
        return made

    def limit(self, key_id: str, quota: Quota) -> Key:
        """Set a key's quota. Raises: UnknownKey."""
        with self._database.begin() as connection:
            version = next_version(connection)
            key = msgspec.structs.replace(_existing(connection, key_id), quota=quota)
            _save(connection, key, version)
        return key

    def limit_owner(self, owner: str, quota: Quota) -> Quota:
        """Set an owner's quota, which all their keys share. Raises: ValueError for an invalid owner."""
        check_owner(owner)
        with self._database.begin() as connection:
            values = {"quota": _text(quota), "version": next_version(connection)}
            if not connection.execute(update(owners).where(owners.c.owner == owner).values(**values)).rowcount:
                connection.execute(insert(owners).values(owner=owner, **values))
        return quota

    def quota_of(self, owner: str) -> Quota:
        """Return an owner's quota; no limits if none were set. Raises: ValueError for an invalid owner."""
        check_owner(owner)
        with self._database.begin() as connection:
            text = connection.execute(select(owners.c.quota).where(owners.c.owner == owner)).scalar()
        return _quota(text or "{}")

    def changed_since(self, version: int) -> Changes:
        """Return the keys, the owners' quotas, the sessions and the shares that were changed after a version.

        The counter is read first, and each writer holds its row until the commit. So every change up to its value is
        visible to the queries after it, at any isolation level. They may also see later changes, which the next call
        returns again.
        """
        with self._database.begin() as connection:
            newest = int(connection.execute(select(key_changes.c.version)).scalar_one())
            if newest == version:
                return Changes([], {}, [], [], version)
            since = version if version < newest else 0  # the database was restored from an older copy
            rows = connection.execute(select(keys).where(keys.c.version > since)).all()
            limited = connection.execute(select(owners).where(owners.c.version > since)).all()
            linked = connection.execute(select(shares).where(shares.c.version > since)).all()
            signed_in = connection.execute(select(sessions).where(sessions.c.version > since)).all()
        found = [struct_of(Session, row) for row in signed_in]
        links = [struct_of(Share, row) for row in linked]
        quotas = {row.owner: _quota(row.quota) for row in limited}
        return Changes([_key(row) for row in rows], quotas, found, links, newest)

    def forget(self, owner: str) -> int:
        """Delete an owner's keys and limits. Returns how many keys there were.

        The ids of the keys stay, revoked and without anything else. So a server that could not reach the database
        meanwhile learns that they are revoked, and no server becomes open because its last key was deleted.
        `find_forgotten` knows them by it.
        """
        with self._database.begin(is_long=True) as connection:
            version = next_version(connection)
            its_keys = select(keys.c.key_id).where(keys.c.owner == owner).order_by(keys.c.key_id)
            connection.execute(its_keys.with_for_update()).all()  # waits for the transactions of `find_forgotten`
            connection.execute(delete(owners).where(owners.c.owner == owner))
            forgotten = _row(Key("", _FORGOTTEN, scopes=(), revoked_s=time.time()))
            del forgotten["key_id"]
            return connection.execute(
                update(keys).where(keys.c.owner == owner).values(**forgotten, version=version)
            ).rowcount


def find_forgotten(connection: Connection, key_ids: Iterable[str]) -> set[str]:
    """Return those of these keys whose owner was deleted, as the first statement of a change. The other keys stay until
    the transaction ends.

    So nothing about an owner is added after their keys are deleted, also by a server that does not know of it yet.
    """
    wanted = sorted(set(key_ids) - {""})  # "": no keys are in use
    if not wanted:
        return set()
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # the driver begins a transaction only before the first change
    query = select(keys.c.key_id, keys.c.owner).where(keys.c.key_id.in_(wanted)).order_by(keys.c.key_id)
    rows = connection.execute(query.with_for_update(read=True, key_share=True)).all()
    return {row.key_id for row in rows if row.owner == _FORGOTTEN}


def next_version(connection: Connection) -> int:
    connection.execute(update(key_changes).values(version=key_changes.c.version + 1))
    return int(connection.execute(select(key_changes.c.version)).scalar_one())


def _existing(connection: Connection, key_id: str) -> Key:
    """Raises: UnknownKey."""
    if "\0" in key_id:  # PostgreSQL refuses such text
        raise UnknownKey("There is no key with this id.")
    query = select(keys).where(keys.c.key_id == key_id, keys.c.owner != _FORGOTTEN)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise UnknownKey("There is no key with this id.")
    return _key(row)


def _save(connection: Connection, key: Key, version: int) -> None:
    connection.execute(update(keys).where(keys.c.key_id == key.key_id).values(**_row(key), version=version))


def _row(key: Key) -> dict[str, Any]:  # Any: of each column's type
    return {**msgspec.structs.asdict(key), "scopes": " ".join(key.scopes), "quota": _text(key.quota)}


def _key(row: Any) -> Key:  # Any: a row of `keys`
    values = {name: getattr(row, name) for name in Key.__struct_fields__}
    return Key(**{**values, "scopes": tuple(row.scopes.split()), "quota": _quota(row.quota)})


def _text(quota: Quota) -> str:
    return msgspec.json.encode(quota).decode()


def _quota(text: str) -> Quota:
    return msgspec.json.decode(text, type=Quota)
