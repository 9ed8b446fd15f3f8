"""The laws of log stores that concern one server."""

from __future__ import annotations

from dataclasses import replace

from tailrace.errors import IdempotencyConflict, SeqOutOfRange, StreamError, StreamExpired, UnknownStream
from tailrace.streams import LogStore, Reader
from tailrace.types import ANONYMOUS, Claim
from tailrace_outer.testing._store_harness import DONE, StoreHarness, StoreLaw, delta, require

__all__ = ["laws_of_one_server"]


async def _dense(harness: StoreHarness) -> None:
    async with harness.server() as store:
        lease = await harness.begin(store)
        expected = []
        for first in range(1, 30, 3):
            some = [delta(number) for number in range(first, first + 3)]
            store.append(lease, some[:1])
            store.append(lease, some[1:])  # in the same turn of the event loop
            expected += some
            if first % 2:
                await harness.wait_for(lease.log, len(expected))
        await harness.wait_for(lease.log, len(expected))
        log = await store.read(ANONYMOUS, lease.stream_id, 20)
        require(log.events == expected, f"{expected} were appended and {log.events} are read")
        with Reader(log, 20) as reader:
            rest = reader.take()
        require(rest == expected[20:], f"after event 20 a reader has {rest}")


async def _separate(harness: StoreHarness) -> None:
    async with harness.server() as store:
        leases = [await harness.begin(store) for _ in range(3)]
        for number in range(1, 10):
            for index, lease in enumerate(leases):
                store.append(lease, (delta(100 * index + number),))
        for index, lease in enumerate(leases):
            await harness.wait_for(lease.log, 9)
            expected = [delta(100 * index + number) for number in range(1, 10)]
            require(lease.log.events == expected, f"stream {index} of three has {lease.log.events}")


async def _one_end(harness: StoreHarness) -> None:
    async with harness.server() as store:
        lease = await harness.begin(store, delta(1))
        store.append(lease, (DONE, delta(2)))
        store.append(lease, (delta(3), DONE))
        await harness.wait_for(lease.log, 2)
        store.append(lease, (DONE,))
        await harness.settle(store)
        require(lease.log.events == [delta(1), DONE], f"with events after its end, a stream has {lease.log.events}")
        if store.state.is_durable:
            async with harness.after_kill() as following:
                taken = await following.take_over()
                require(lease.stream_id not in [one.stream_id for one in taken], "an ended stream was taken over")
                log = await following.read(ANONYMOUS, lease.stream_id)
                require(log.events == [delta(1), DONE], f"the next server has {log.events}")


async def _followers(harness: StoreHarness) -> None:
    async with harness.server() as store:
        lease = await harness.begin(store, delta(1))
        log = await store.read(ANONYMOUS, lease.stream_id)
        with Reader(log) as reader:
            got = [reader.take(), reader.take()]
            store.append(lease, (delta(2),))
            await harness.wait_for(log, 2)
            got.append(reader.take())
            store.append(lease, (DONE,))
            await harness.wait_for(log, 3)
            got.append(reader.take())
            require(got == [[delta(1)], [], [delta(2)], DONE], f"a reader got {got}")
        require(log.expires_in_s is not None, "the retention of an ended stream has not started")


async def _bounds(harness: StoreHarness) -> None:
    async with harness.server() as store:
        lease = await harness.begin(store, delta(1), delta(2))
        error = await harness.error_of(store.read(ANONYMOUS, lease.stream_id, 2))
        require(error is None, f"read() after the last event raised {error!r}")
        error = await harness.error_of(store.read(ANONYMOUS, lease.stream_id, 3))
        require(isinstance(error, SeqOutOfRange), f"read() after event 3 of 2 raised {error!r}")
        error = await harness.error_of(store.read(ANONYMOUS, "x" * 22))
        require(type(error) is UnknownStream, f"read() of an unknown stream raised {error!r}")


async def _old_lease(harness: StoreHarness) -> None:
    async with harness.server() as store:
        lease = await harness.begin(store, delta(1))
        epoch = store.state.epoch
        require(lease.epoch == epoch >= 1, f"epoch {lease.epoch} of a lease, {epoch} of the store")
        await harness.try_append(store, replace(lease, epoch=lease.epoch - 1), delta(2))
        await harness.settle(store)
        require(lease.log.events == [delta(1)], f"events of an older epoch were kept: {lease.log.events}")
        store.append(lease, (delta(3),))
        await harness.wait_for(lease.log, 2)
        require(lease.log.events == [delta(1), delta(3)], f"after a refused append() there are {lease.log.events}")


async def _closed(harness: StoreHarness) -> None:
    async with harness.server() as store:
        lease = await harness.begin(store, delta(1))
    await harness.try_append(store, lease, delta(2))
    require(lease.log.events == [delta(1)], f"a closed store kept an event: {lease.log.events}")


async def _queued(harness: StoreHarness) -> None:
    async with harness.server() as store:
        lease = await harness.begin(store, delta(1))
        expected = [delta(1)]
        for number in range(2, 8):
            store.append(lease, (delta(number),))
            expected.append(delta(number))
            known = [*lease.log.events, *lease.log.queued]
            require(known == expected, f"{expected} were appended; the log and its queue have {known}")
            if number % 3 == 0:
                await harness.wait_for(lease.log, number)
        await harness.wait_for(lease.log, len(expected))
        left = list(lease.log.queued)
        require(not left, f"all events can be read, and the queue has {left}")


async def _stop(harness: StoreHarness) -> None:
    async with harness.server() as store:
        lease, neighbour = await harness.begin(store, delta(1)), await harness.begin(store, delta(1))
        log = await store.stop(ANONYMOUS, lease.stream_id)
        require(log.end is not None and log.end.status == "cancelled", f"when stop() returned, the end was {log.end}")
        await store.stop(ANONYMOUS, lease.stream_id)
        require(log.last_seq == 2, f"stopped twice, a stream has {log.events}")
        require(neighbour.log.end is None, "another stream was stopped as well")


async def _delete(harness: StoreHarness) -> None:
    async with harness.server() as store:
        claim = Claim("key", b"request")
        lease = await harness.begin(store, delta(1), claim=claim)
        await store.delete(ANONYMOUS, lease.stream_id)
        error = await harness.error_of(store.read(ANONYMOUS, lease.stream_id))
        require(error is None, f"a running stream was deleted: read() raised {error!r}")
        await harness.finish(store, lease)
        await store.delete(ANONYMOUS, lease.stream_id)
        await _require_gone(harness, store, lease.stream_id, claim)
        if store.state.is_durable:
            async with harness.after_kill() as following:
                taken = await following.take_over()
                require(lease.stream_id not in [one.stream_id for one in taken], "a deleted stream was taken over")
                await _require_gone(harness, following, lease.stream_id, claim)


async def _require_gone(harness: StoreHarness, store: LogStore, stream_id: str, claim: Claim) -> None:
    for method in (store.read, store.stop, store.delete):
        error = await harness.error_of(method(ANONYMOUS, stream_id))
        require(isinstance(error, StreamError), f"{method.__name__}() of a deleted stream raised {error!r}")
    require(await store.recall(ANONYMOUS, claim) is None, "the key of a deleted stream still finds a stream")


async def _recall(harness: StoreHarness) -> None:
    async with harness.server() as store:
        claim = Claim("key", b"request")
        mine, theirs = await harness.begin(store, owner="me", claim=claim), None
        require(await store.recall("you", claim) is None, "a key finds the stream of another owner")
        theirs = await harness.begin(store, delta(1), owner="you", claim=claim)
        await harness.finish(store, theirs)
        found = await store.recall("me", claim), await store.recall("you", claim)
        require(found == (mine.log, theirs.log), "the same key of two owners does not find the stream of each")
        error = await harness.error_of(store.recall("me", Claim("key", b"another")))
        require(isinstance(error, IdempotencyConflict), f"recall() for another request raised {error!r}")
        require(await store.recall("me", Claim("other", b"request")) is None, "an unused key finds a stream")


async def _owners(harness: StoreHarness) -> None:
    async with harness.server() as store:
        running, finished, deleted = [await harness.begin(store, delta(1), owner="me") for _ in range(3)]
        for lease in (finished, deleted):
            await harness.finish(store, lease)
        await store.delete("me", deleted.stream_id)
        never = await harness.error_of(store.read("you", "x" * 22))
        for lease in (running, finished, deleted):
            for method in (store.read, store.stop, store.delete):
                error = await harness.error_of(method("you", lease.stream_id))
                is_same = type(error) is UnknownStream and str(error) == str(never)
                require(is_same, f"{method.__name__}() of another owner's stream raised {error!r}, not {never!r}")
        require(running.log.end is None, "another owner stopped a stream")
        of_me = sorted([running.stream_id, finished.stream_id])
        require(
            sorted(await store.streams_of("me")) == of_me, "streams_of() does not return exactly the owner's streams"
        )
        require(await store.streams_of("you") == [], "streams_of() returns streams of another owner")
        error = await harness.error_of(store.read("me", finished.stream_id))
        require(error is None, f"read() by the owner raised {error!r}")
        error = await harness.error_of(store.read("me", deleted.stream_id))
        require(isinstance(error, StreamExpired), f"read() of a deleted stream by its owner raised {error!r}")


async def _topics(harness: StoreHarness) -> None:
    async with harness.server() as store:
        older = await harness.begin(store, delta(1), owner="me", wire="a", topics=("chat", "one"), created_s=1.0)
        newer = await harness.begin(store, delta(1), owner="me", wire="a", topics=("chat", "two"), created_s=2.0)
        for wire, owner, topic in (("a", "you", "chat"), ("b", "me", "chat"), ("a", "me", "chat/1"), ("a", "me", "")):
            await harness.begin(store, delta(1), owner=owner, wire=wire, topics=(topic,), created_s=3.0)
        found = await store.newest("me", "a", "chat")
        require(found is newer.log, "newest() does not find the newest stream of this owner, wire and topic")
        require(await store.newest("me", "a", "cha") is None, "newest() finds a stream in a topic without streams")
        if store.state.is_durable:
            async with harness.after_kill() as following:
                await following.take_over()
                found = await following.newest("me", "a", "chat")
                is_newer = found is not None and found.stream_id == newer.stream_id
                require(is_newer, "the next server does not find the newest stream of a topic")
                found = await following.newest("me", "a", "one")
                is_older = found is not None and found.stream_id == older.stream_id
                require(is_older, "the next server does not find a stream by the second of its topics")
        await harness.finish(store, newer)
        require(await store.newest("me", "a", "chat") is older.log, "newest() does not pass over streams that ended")
        await harness.finish(store, older)
        require(await store.newest("me", "a", "chat") is None, "newest() finds a stream that has ended")
        await _require_ended(harness, store, newer.stream_id)
        if store.state.is_durable:
            async with harness.after_kill() as following:
                await following.take_over()
                await _require_ended(harness, following, newer.stream_id)
        await store.delete("me", newer.stream_id)
        require(await store.newest("me", "a", "two", has_ended=True) is None, "newest() finds a deleted stream")


async def _require_ended(harness: StoreHarness, store: LogStore, stream_id: str) -> None:
    found = await store.newest("me", "a", "two", has_ended=True)
    is_found = found is not None and found.stream_id == stream_id and found.end == DONE
    require(is_found, f"newest() does not find a stream that has ended: it returns {found}")
    require(await store.newest("you", "a", "two", has_ended=True) is None, "it finds one of another owner")


laws_of_one_server = (
    StoreLaw("numbers_are_dense", "events are read in the order of append(), numbered from 1 without gaps", _dense),
    StoreLaw("streams_are_apart", "an event is only in the stream to which it was appended", _separate),
    StoreLaw("one_terminal_event", "no event is kept after the terminal event", _one_end),
    StoreLaw("followers_see_all", "a reader gets the kept events, then each new event, then the end", _followers),
    StoreLaw("reading_has_bounds", "read() refuses unknown streams, and positions after the last event", _bounds),
    StoreLaw("older_epochs_are_refused", "events of an older epoch are not kept", _old_lease),
    StoreLaw("closed_is_closed", "a closed store keeps no events", _closed),
    StoreLaw("queued_is_known", "an appended event is in the log or in its queue, in order", _queued),
    StoreLaw("stopping_ends", "when stop() returns, the end of the stream can be read", _stop),
    StoreLaw("deleted_is_gone", "a deleted stream stays deleted, and its key can be used again", _delete),
    StoreLaw("keys_belong_to_owners", "recall() finds a stream by owner, key and request", _recall),
    StoreLaw("topics_have_streams", "newest() finds the newest unfinished stream of a topic", _topics),
    StoreLaw("owners_are_apart", "another owner's stream answers like an unknown stream", _owners),
)
