"""Shares in the database."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import delete, func, insert, select, update

from tailrace.access.shares import Share
from tailrace.errors import KeyRevoked, RequestError, UnknownShare
from tailrace.records.database_tables import shares
from tailrace.records.key_store import find_forgotten, next_version
from tailrace.records.record_database import RecordDatabase, struct_of

__all__ = ["ShareStore"]

MAX_SHARES = 1000  # of an owner
ENDED_S = 600.0  # after this time, servers know that a share was revoked, or will read all shares


class ShareStore:
    """Stores and revokes shares. Calls block; each is one transaction. Raises: StorageError."""

    def __init__(self, database: RecordDatabase) -> None:
        self._database = database

    def add(self, share: Share) -> None:
        """Raises: RequestError if the owner has too many; KeyRevoked if the owner of the key was deleted."""
        with self._database.begin() as connection:
            if find_forgotten(connection, [share.key_id]):
                raise KeyRevoked("The key was revoked.")
            version = next_version(connection)
            mine = select(func.count()).where(shares.c.owner == share.owner, *_is_active(time.time()))
            if (connection.execute(mine).scalar() or 0) >= MAX_SHARES:
                raise RequestError(f"You have {MAX_SHARES} links. Revoke one first.")
            connection.execute(insert(shares).values(**msgspec.structs.asdict(share), version=version))

    def list(self, owner: str) -> Sequence[Share]:
        """Return an owner's links that have not ended, the newest first."""
        query = select(shares).where(shares.c.owner == owner, *_is_active(time.time()))
        with self._database.begin() as connection:
            rows = connection.execute(query.order_by(shares.c.created_s.desc(), shares.c.share_id)).all()
        return [struct_of(Share, row) for row in rows]

    def revoke(self, owner: str, share_id: str) -> None:
        """Raises: UnknownShare if the owner has no such link."""
        if "\0" in share_id:  # PostgreSQL refuses such text
            raise UnknownShare("There is no link with this id.")
        with self._database.begin() as connection:
            version = next_version(connection)
            one = (shares.c.owner == owner) & (shares.c.share_id == share_id)
            values = {"revoked_s": func.coalesce(shares.c.revoked_s, time.time()), "version": version}
            if not connection.execute(update(shares).where(one).values(**values)).rowcount:
                raise UnknownShare("There is no link with this id.")

    def forget(self, owner: str) -> int:
        """Delete all links of an owner, whose keys must be revoked. Returns how many there were."""
        with self._database.begin(is_long=True) as connection:
            return connection.execute(delete(shares).where(shares.c.owner == owner)).rowcount

    def delete_ended(self) -> None:
        """Delete the links that ended some time ago."""
        before_s = time.time() - ENDED_S
        with self._database.begin(is_long=True) as connection:
            is_over = (shares.c.expires_s < before_s) | (shares.c.revoked_s < before_s)
            connection.execute(delete(shares).where(is_over))


def _is_active(now_s: float) -> tuple[Any, ...]:  # Any: conditions of a query
    return shares.c.revoked_s.is_(None), shares.c.expires_s > now_s
