"""Streams that tests write themselves, in a store that servers share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tests.waiting import LONG_S

from tailrace.errors import LeaseLost
from tailrace.streams import Lease, Producer, Reader, StreamLog
from tailrace.types import Claim, End, Event, Failure, Prompt, Record, Sampling, TextDelta, Usage, new_stream_id
from tailrace_outer.redis.redis_store import RedisLogStore

__all__ = ["DONE", "LEASE_S", "Writer", "begin", "delta", "new_record", "seen", "takes"]

LEASE_S = 1.0
DONE = End("done", Usage(2, 3))


def delta(number: int) -> TextDelta:
    return TextDelta(f" word {number}", (number,))


@dataclass
class Writer(Producer):
    """A producer that writes when the test says so."""

    store: RedisLogStore
    lease: Lease
    heard: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lease.log.producer = self

    def write(self, *events: Event) -> None:
        self.store.append(self.lease, events)

    def cancel(self) -> None:
        self.heard.append("cancel")
        self.write(End("cancelled", Usage(2, 0), Failure("cancelled", "It was stopped.")))

    def read(self) -> None:
        self.heard.append("read")

    def unread(self) -> None:
        self.heard.append("unread")

    def lease_lost(self) -> None:
        self.heard.append("lease_lost")
        self.lease.log.release(LeaseLost("Another server writes this stream now."))


def new_record(*, claim: Claim | None = None, model: str = "m") -> Record:
    return Record(
        new_stream_id(),
        1.5,
        model=model,
        prompts=(Prompt("Once", ((1, 2),)),),
        sampling=Sampling(seed=7, max_tokens=100),
        num_prompt_tokens=2,
        claim=claim,
    )


async def begin(store: RedisLogStore, *events: Event, claim: Claim | None = None, model: str = "m") -> Writer:
    writer = Writer(store, await store.open(new_record(claim=claim, model=model)))
    if events:
        writer.write(*events)
        await seen(writer.lease.log, len(events))
    return writer


async def seen(log: StreamLog, count: int) -> None:
    """Return when so many events can be read."""
    async with asyncio.timeout(LONG_S):
        while log.last_seq < count:
            await Reader(log, log.last_seq).wait()


async def takes(store: RedisLogStore) -> list[Lease]:
    """Return the leases that a store gets when it sees that another server is dead."""
    async with asyncio.timeout(LONG_S):
        while True:
            if leases := await store.take_over({"m"}, waits=True):
                return leases
