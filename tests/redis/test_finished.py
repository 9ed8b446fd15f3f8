"""The cache of ended streams in a store that servers share."""

from __future__ import annotations

import asyncio

from tests.redis.shared_streams import DONE, LEASE_S
from tests.testing.redis_server import shared_url
from tests.waiting import turn

from tailrace.streams import StreamLog
from tailrace.streams.rows import Rows
from tailrace.types import Record, TextDelta, new_stream_id
from tailrace_outer.redis._claims import Claims
from tailrace_outer.redis._connection import Connection
from tailrace_outer.redis._finished import FinishedStreams
from tailrace_outer.redis._members import Members
from tailrace_outer.redis._topics import Topics
from tailrace_outer.redis.stream_states import StreamStates


async def test_a_stream_may_leave_the_cache_while_it_is_found() -> None:
    """Another client deletes it, or others take its place."""
    async with Connection.open(shared_url()) as connection:
        members, names = Members(connection, lease_s=LEASE_S), (Claims(connection), Topics(connection))
        streams = StreamStates()
        finished = FinishedStreams(
            connection, members, *names, Rows(None), streams, retention_s=60.0, budget_bytes=2**30, keeps=True
        )
        log = StreamLog(Record(new_stream_id(), 1.5), [DONE])
        finished.cache(log)
        await connection.ask(connection.client.set(connection.keys.stream(log.stream_id), b"kept"))
        finding = asyncio.create_task(finished.find(log.stream_id))
        await turn()  # it waits for Redis
        for _ in range(2):
            finished.cache(StreamLog(Record(new_stream_id(), 1.5), [TextDelta("x" * 2**26, ()), DONE]))
        assert streams.log(log.stream_id) is None
        assert await finding is log


async def test_an_ended_stream_that_several_find_at_once_takes_its_memory_once() -> None:
    """It leaves room for others: the memory for ended streams is limited."""
    async with Connection.open(shared_url()) as connection:
        members, names = Members(connection, lease_s=LEASE_S), (Claims(connection), Topics(connection))
        streams = StreamStates()
        finished = FinishedStreams(
            connection, members, *names, Rows(None), streams, retention_s=60.0, budget_bytes=2**30, keeps=True
        )
        other, found = Record(new_stream_id(), 1.5), Record(new_stream_id(), 1.5)
        finished.cache(StreamLog(other, [DONE]))
        for _ in range(3):
            finished.cache(StreamLog(found, [TextDelta("x" * 2**25, ()), DONE]))
        assert streams.log(other.stream_id) is not None
