"""Sessions of browsers in the database."""

from __future__ import annotations

import time

import msgspec
from sqlalchemy import delete, func, insert, select, update

from tailrace.access.sessions import Session
from tailrace.records.database_tables import sessions
from tailrace.records.key_store import next_version
from tailrace.records.record_database import RecordDatabase

__all__ = ["SessionStore"]

_MAX_SESSIONS = 100  # per key
_ENDED_S = 600.0  # after this time, servers know that a session has ended, or will read all sessions


class SessionStore:
    """Stores and ends sessions. Calls block; each is one transaction. Raises: StorageError."""

    def __init__(self, database: RecordDatabase) -> None:
        self._database = database

    def add(self, session: Session) -> None:
        """Store a session. If its key has too many, the session that would expire first is ended."""
        of_key = sessions.c.key_id == session.key_id
        with self._database.begin() as connection:
            version = next_version(connection)
            now_s = time.time()
            known = sessions.c.ended_s < now_s - _ENDED_S
            connection.execute(delete(sessions).where((sessions.c.expires_s < now_s) | known))
            live = of_key & sessions.c.ended_s.is_(None)
            if (connection.execute(select(func.count()).where(live)).scalar() or 0) >= _MAX_SESSIONS:
                oldest = select(sessions.c.token_hash).where(live).order_by(sessions.c.expires_s).limit(1)
                one = sessions.c.token_hash == oldest.scalar_subquery()
                connection.execute(update(sessions).where(one).values(ended_s=time.time(), version=version))
            connection.execute(insert(sessions).values(**msgspec.structs.asdict(session), version=version))

    def end(self, token_hash: bytes) -> None:
        """End a session. Does nothing if there is no such session."""
        with self._database.begin() as connection:
            values = {"ended_s": time.time(), "version": next_version(connection)}
            connection.execute(update(sessions).where(sessions.c.token_hash == token_hash).values(**values))
