"""The form of the data in Redis, which all servers that share a store must have in common."""

from __future__ import annotations

from tailrace.errors import JournalDamaged, ModelError
from tailrace.streams.rows import Rows
from tailrace_outer.redis._connection import Connection

__all__ = ["check_format"]

_FORMAT = "1"  # of keys and values
_LOG_FORMAT = "1"  # of the logs of extensions, under the name that the first of them had


async def check_format(connection: Connection, rows: Rows) -> None:
    """Store the form of the data if this is the first server, else compare them.

    Raises: ModelError if the other servers write the store in another way, StorageError.
    """
    client, properties = connection.client, connection.keys.properties
    num_shards = str(connection.keys.num_shards)
    own = {"format": _FORMAT, "durable": _LOG_FORMAT, "shards": num_shards, "sealed": rows.encrypt(b"", "sealed")}
    kept: dict[bytes, bytes] = {}
    while not kept.keys() >= {name.encode() for name in own}:  # again, if Redis loses everything meanwhile
        for name, value in own.items():
            await connection.ask(client.hsetnx(properties, name, value))
        kept = await connection.ask(client.hgetall(properties))
    if (kept[b"format"].decode(), kept[b"durable"].decode()) != (_FORMAT, _LOG_FORMAT):
        raise ModelError(
            "Servers of another version of tailrace share this Redis, and keep streams in another form. Give this "
            "version its own ?prefix= in the URL of --journal."
        )
    if kept[b"shards"].decode() != num_shards:
        raise ModelError(
            "The streams of this prefix were kept in a Redis Cluster, and this is a single Redis, or the other way "
            "round. Use another ?prefix= in the URL of --journal."
        )
    try:
        rows.open(kept[b"sealed"], "sealed")
        if rows.is_encrypting and not rows.is_encrypted(kept[b"sealed"]):
            raise JournalDamaged("not encrypted")
    except JournalDamaged:
        raise ModelError(
            "The servers that share this Redis encrypt streams with another key, or do not encrypt them. Give all of "
            "them the same --journal-key-file, or this one its own ?prefix= in the URL of --journal."
        ) from None
