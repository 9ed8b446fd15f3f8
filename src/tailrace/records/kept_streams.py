"""Stored responses: finished streams in the database, which keeps them longer than the log store."""

from __future__ import annotations

import msgspec
from sqlalchemy import delete, insert, select

from tailrace.records._image_rows import RESPONSE, forget_images, release, release_responses_before
from tailrace.records.database_tables import kept_streams
from tailrace.records.key_store import find_forgotten
from tailrace.records.record_database import RecordDatabase
from tailrace.streams import StreamLog
from tailrace.types import Event, Record, TextDelta, is_stream_id

__all__ = ["KeptStreams"]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Record, list[Event[TextDelta]]]).decode


class KeptStreams:
    """Stores, reads and deletes finished streams. Calls block; each is one transaction. Raises: StorageError."""

    def __init__(self, database: RecordDatabase) -> None:
        self._database = database

    def put(self, log: StreamLog) -> None:
        """Store a finished stream. Does nothing if it is already stored, or its owner was deleted."""
        record = log.record.finished()
        row = {
            "stream_id": record.stream_id,
            "owner": record.owner,
            "created_s": record.created_s,
            "stream": _encode((record, log.events)),
        }
        is_it = kept_streams.c.stream_id == record.stream_id
        with self._database.begin() as connection:
            if find_forgotten(connection, [record.key_id]):
                return
            if connection.execute(select(kept_streams.c.stream_id).where(is_it)).first() is None:
                connection.execute(insert(kept_streams).values(**row))

    def get(self, owner: str, stream_id: str) -> StreamLog | None:
        """Return a stream of this owner, or None."""
        if not is_stream_id(stream_id):
            return None
        query = select(kept_streams.c.stream).where(
            kept_streams.c.stream_id == stream_id, kept_streams.c.owner == owner
        )
        with self._database.begin() as connection:
            found = connection.execute(query).scalar_one_or_none()
        return StreamLog(*_decode(found)) if found is not None else None

    def delete(self, owner: str, stream_id: str) -> None:
        its_row = (kept_streams.c.stream_id == stream_id, kept_streams.c.owner == owner)
        with self._database.begin() as connection:
            connection.execute(delete(kept_streams).where(*its_row))
            release(connection, owner, RESPONSE + stream_id)

    def forget(self, owner: str) -> int:
        """Delete all streams of an owner; returns how many there were."""
        with self._database.begin(is_long=True) as connection:
            number = connection.execute(delete(kept_streams).where(kept_streams.c.owner == owner)).rowcount
            forget_images(connection, owner, of_responses=True)
            return number

    def delete_before(self, created_s: float) -> None:
        with self._database.begin(is_long=True) as connection:
            connection.execute(delete(kept_streams).where(kept_streams.c.created_s < created_s))
            release_responses_before(connection, created_s)
