"""The laws of log stores that concern the next server."""

from __future__ import annotations

from contextlib import suppress

from tailrace.errors import ModelError, StreamExpired, UnknownStream
from tailrace.streams import Lease, LogStore
from tailrace.types import ANONYMOUS, Claim
from tailrace_outer.testing._store_harness import DONE, StoreHarness, StoreLaw, delta, require

__all__ = ["laws_of_the_next_server"]


async def _opened(harness: StoreHarness) -> None:
    async with harness.server() as store:
        lease = await harness.begin(store, claim=Claim("key", b"request"), owner="me")
        async with harness.after_kill() as following:
            taken = await following.take_over()
            records = [one.log.record for one in taken]
            require(records == [lease.log.record], f"{lease.log.record} was opened, and the next server has {records}")
            found = await following.recall("me", Claim("key", b"request"))
            require(found is taken[0].log, "the key of an opened stream does not find it")


async def _visible_is_kept(harness: StoreHarness) -> None:
    async with harness.server() as store:
        lease = await harness.begin(store)
        for number in range(1, 6):
            store.append(lease, (delta(number),))
            await _require_kept(harness, lease)  # the events that can be read before the append is kept
            await harness.wait_for(lease.log, number)
            await _require_kept(harness, lease)


async def _require_kept(harness: StoreHarness, lease: Lease) -> None:
    seen = list(lease.log.events)
    async with harness.after_kill() as following:
        (taken,) = await following.take_over()
        kept = taken.log.events[: len(seen)]
        require(kept == seen, f"{seen} could be read when the server was killed, but the next one has {kept}")


async def _epochs(harness: StoreHarness) -> None:
    epochs = []
    for _ in range(3):
        async with harness.server() as store:
            epochs.append(store.state.epoch)
    require(epochs == sorted(set(epochs)), f"successive servers had the epochs {epochs}")


async def _fenced(harness: StoreHarness) -> None:
    async with harness.server() as first:
        old = await harness.begin(first, delta(1))
    async with harness.server() as second:
        (lease,) = await second.take_over()
        await harness.try_append(first, old, delta(2))
        await harness.try_append(second, old, delta(3))
        await harness.settle(second)
        second.append(lease, (delta(4),))
        await harness.wait_for(lease.log, 2)
        log = await second.read(ANONYMOUS, old.stream_id)
        require(log.events == [delta(1), delta(4)], f"events of the old lease were kept: {log.events}")
        async with harness.after_kill() as following:
            kept = {one.stream_id: one.log.events for one in await following.take_over()}.get(old.stream_id)
            require(kept == [delta(1), delta(4)], f"the next server has {kept}")


async def _once(harness: StoreHarness) -> None:
    async with harness.server() as store:
        begun = [await harness.begin(store, *map(delta, range(1, count))) for count in (4, 1, 3, 2)]
        await harness.finish(store, begun[2])
        expected = [lease.stream_id for lease in begun if lease.log.end is None]
    for _ in range(2):  # they are taken over again when that server is gone, too
        async with harness.server() as store:
            taken = [lease.stream_id for lease in await store.take_over()]
            require(taken == expected, f"of the streams {expected} the next server got {taken}")
            again = [lease.stream_id for lease in await store.take_over()]
            require(not again, f"its second take_over() returned {again}")
            with suppress(ModelError):  # some stores allow only one server
                async with harness.server() as other:
                    stolen = [lease.stream_id for lease in await other.take_over()]
                    require(not stolen, f"a second server got {stolen} as well")


async def _continued(harness: StoreHarness) -> None:
    expected = []
    async with harness.server() as store:
        lease = await harness.begin(store)
        stream_id = lease.stream_id
    for number in range(1, 7, 2):
        async with harness.server() as store:
            (lease,) = await store.take_over()
            store.append(lease, (delta(number), delta(number + 1)))
            expected += [delta(number), delta(number + 1)]
            await harness.wait_for(lease.log, len(expected))
            log = await store.read(ANONYMOUS, stream_id)
            require(log.events == expected, f"a continued stream has {log.events}, not {expected}")


async def _finished(harness: StoreHarness) -> None:
    claim = Claim("key", b"request")
    async with harness.server() as store:
        lease = await harness.begin(store, delta(1), owner="me", claim=claim)
        await harness.finish(store, lease)
        deleted = await harness.begin(store, delta(1), owner="me")
        await harness.finish(store, deleted)
        await store.delete("me", deleted.stream_id)
        async with harness.after_kill() as following:
            await _require_finished(harness, following, lease, deleted, claim)
    async with harness.server() as following:
        await _require_finished(harness, following, lease, deleted, claim)


async def _require_finished(harness: StoreHarness, store: LogStore, lease: Lease, deleted: Lease, claim: Claim) -> None:
    taken = [one.stream_id for one in await store.take_over()]
    require(not taken, f"ended streams were taken over: {taken}")
    for stream_id in (lease.stream_id, deleted.stream_id):
        for other in ("you", ANONYMOUS):
            error = await harness.error_of(store.read(other, stream_id))
            require(type(error) is UnknownStream, f"read() of another owner's stream raised {error!r}")
    error = await harness.error_of(store.read("me", deleted.stream_id))
    require(isinstance(error, StreamExpired), f"read() of a deleted stream by its owner raised {error!r}")
    log = await store.read("me", lease.stream_id)
    require(log.events == [delta(1), DONE], f"of {[delta(1), DONE]} the next server has {log.events}")
    require(log.record.memo == b"a memo", f"the memo of the stream is {log.record.memo!r}")
    require(await store.recall("me", claim) is log, "the key does not find its stream")
    require(await store.recall("you", claim) is None, "the key finds the stream of another owner")


laws_of_the_next_server = (
    StoreLaw("opened_is_kept", "when open() has returned, a stream survives a crash", _opened, durable=True),
    StoreLaw("seen_is_kept", "an event that can be read survives a crash", _visible_is_kept, durable=True),
    StoreLaw("epochs_grow", "each server has a larger epoch than all earlier servers", _epochs, durable=True),
    StoreLaw(
        "old_owners_are_refused", "a server cannot append to streams that another took over", _fenced, durable=True
    ),
    StoreLaw("taken_over_once", "each unfinished stream is taken over once, the oldest first", _once, durable=True),
    StoreLaw("streams_go_on", "the next server appends after the existing events", _continued, durable=True),
    StoreLaw("finished_is_kept", "the next server shows finished streams to their owners", _finished, durable=True),
)
