"""What a log store owes its readers while one server runs."""

from __future__ import annotations

from dataclasses import replace

from tailrace.errors import IdempotencyConflict, SeqOutOfRange, StreamError, StreamExpired, UnknownStream
from tailrace.streams import Claim, LogStore, Reader
from tailrace.testing._store_trial import DONE, StoreLaw, StoreTrial, delta, hold
from tailrace.types import ANONYMOUS

__all__ = ["laws_of_one_server"]


async def _dense(trial: StoreTrial) -> None:
    async with trial.server() as store:
        lease = await trial.begin(store)
        expected = []
        for first in range(1, 30, 3):
            some = [delta(number) for number in range(first, first + 3)]
            store.append(lease, some[:1])
            store.append(lease, some[1:])  # in the same turn of the event loop
            expected += some
            if first % 2:
                await trial.seen(lease.log, len(expected))
        await trial.seen(lease.log, len(expected))
        log = await store.read(ANONYMOUS, lease.stream_id, 20)
        hold(log.events == expected, f"{expected} were appended and {log.events} are read")
        with Reader(log, 20) as reader:
            behind = list(reader.take())
        hold(behind == expected[20:], f"behind event 20 a reader has {behind}")


async def _apart(trial: StoreTrial) -> None:
    async with trial.server() as store:
        leases = [await trial.begin(store) for _ in range(3)]
        for number in range(1, 10):
            for index, lease in enumerate(leases):
                store.append(lease, (delta(100 * index + number),))
        for index, lease in enumerate(leases):
            await trial.seen(lease.log, 9)
            expected = [delta(100 * index + number) for number in range(1, 10)]
            hold(lease.log.events == expected, f"stream {index} of three has {lease.log.events}")


async def _one_end(trial: StoreTrial) -> None:
    async with trial.server() as store:
        lease = await trial.begin(store, delta(1))
        store.append(lease, (DONE, delta(2)))
        store.append(lease, (delta(3), DONE))
        await trial.seen(lease.log, 2)
        store.append(lease, (DONE,))
        await trial.settle(store)
        hold(lease.log.events == [delta(1), DONE], f"with its end in the middle, a stream has {lease.log.events}")
        if store.is_durable:
            async with trial.after_kill() as following:
                taken = await following.take_over()
                hold(lease.stream_id not in [one.stream_id for one in taken], "a stream with an end was handed out")
                log = await following.read(ANONYMOUS, lease.stream_id)
                hold(log.events == [delta(1), DONE], f"the next server has {log.events}")


async def _followers(trial: StoreTrial) -> None:
    async with trial.server() as store:
        lease = await trial.begin(store, delta(1))
        log = await store.read(ANONYMOUS, lease.stream_id)
        with Reader(log) as reader:
            got = list(reader.take())
            for event in (delta(2), DONE):
                store.append(lease, (event,))
                await trial.seen(log, len(got) + 1)
                got += reader.take()
            hold(got == [delta(1), delta(2), DONE], f"a reader got {got}")
            hold(reader.is_finished, "behind the end a reader is not finished")
        hold(log.expires_in_s is not None, "a stream has ended, and its time does not run")


async def _bounds(trial: StoreTrial) -> None:
    async with trial.server() as store:
        lease = await trial.begin(store, delta(1), delta(2))
        error = await trial.refused(store.read(ANONYMOUS, lease.stream_id, 2))
        hold(error is None, f"read() behind the last event raised {error!r}")
        error = await trial.refused(store.read(ANONYMOUS, lease.stream_id, 3))
        hold(isinstance(error, SeqOutOfRange), f"read() behind event 3 of 2 raised {error!r}")
        error = await trial.refused(store.read(ANONYMOUS, "x" * 22))
        hold(type(error) is UnknownStream, f"read() of a stream that never was raised {error!r}")


async def _old_lease(trial: StoreTrial) -> None:
    async with trial.server() as store:
        lease = await trial.begin(store, delta(1))
        hold(lease.epoch == store.epoch >= 1, f"epoch {lease.epoch} of a lease, {store.epoch} of the store")
        await trial.try_append(store, replace(lease, epoch=lease.epoch - 1), delta(2))
        await trial.settle(store)
        hold(lease.log.events == [delta(1)], f"an older epoch appended: {lease.log.events}")
        store.append(lease, (delta(3),))
        await trial.seen(lease.log, 2)
        hold(lease.log.events == [delta(1), delta(3)], f"and its successor: {lease.log.events}")


async def _closed(trial: StoreTrial) -> None:
    async with trial.server() as store:
        lease = await trial.begin(store, delta(1))
    await trial.try_append(store, lease, delta(2))
    hold(lease.log.events == [delta(1)], f"a store that is closed took an event: {lease.log.events}")


async def _retract(trial: StoreTrial) -> None:
    async with trial.server() as store:
        lease = await trial.begin(store, delta(1))
        store.append(lease, (delta(2),))
        store.retract(lease)
        left = list(lease.log.events)
        await trial.settle(store)
        hold(lease.log.events == left, f"after retract() there were {left}, and later {lease.log.events}")
        store.append(lease, (delta(3),))
        await trial.seen(lease.log, len(left) + 1)
        hold(lease.log.events == [*left, delta(3)], f"after retract() and append() there are {lease.log.events}")


async def _stop(trial: StoreTrial) -> None:
    async with trial.server() as store:
        lease, neighbour = await trial.begin(store, delta(1)), await trial.begin(store, delta(1))
        log = await store.stop(ANONYMOUS, lease.stream_id)
        hold(log.end is not None and log.end.status == "cancelled", f"when stop() returned, the end was {log.end}")
        await store.stop(ANONYMOUS, lease.stream_id)
        hold(log.last_seq == 2, f"stopped twice, a stream has {log.events}")
        hold(neighbour.log.end is None, "another stream was stopped as well")


async def _delete(trial: StoreTrial) -> None:
    async with trial.server() as store:
        claim = Claim("key", b"request")
        lease = await trial.begin(store, delta(1), claim=claim)
        await store.delete(ANONYMOUS, lease.stream_id)
        error = await trial.refused(store.read(ANONYMOUS, lease.stream_id))
        hold(error is None, f"a stream that runs was deleted: read() raised {error!r}")
        await trial.finish(store, lease)
        await store.delete(ANONYMOUS, lease.stream_id)
        await _hold_gone(trial, store, lease.stream_id, claim)
        if store.is_durable:
            async with trial.after_kill() as following:
                taken = await following.take_over()
                hold(lease.stream_id not in [one.stream_id for one in taken], "a deleted stream was handed out")
                await _hold_gone(trial, following, lease.stream_id, claim)


async def _hold_gone(trial: StoreTrial, store: LogStore, stream_id: str, claim: Claim) -> None:
    for asked in (store.read, store.stop, store.delete):
        error = await trial.refused(asked(ANONYMOUS, stream_id))
        hold(isinstance(error, StreamError), f"{asked.__name__}() of a deleted stream raised {error!r}")
    hold(await store.recall(ANONYMOUS, claim) is None, "the key of a deleted stream is still taken")


async def _recall(trial: StoreTrial) -> None:
    async with trial.server() as store:
        claim = Claim("key", b"request")
        mine, theirs = await trial.begin(store, owner="me", claim=claim), None
        hold(await store.recall("you", claim) is None, "a key is taken for another owner")
        theirs = await trial.begin(store, delta(1), owner="you", claim=claim)
        await trial.finish(store, theirs)
        found = await store.recall("me", claim), await store.recall("you", claim)
        hold(found == (mine.log, theirs.log), "the same key of two owners does not find the stream of each")
        error = await trial.refused(store.recall("me", Claim("key", b"another")))
        hold(isinstance(error, IdempotencyConflict), f"recall() for another request raised {error!r}")
        hold(await store.recall("me", Claim("other", b"request")) is None, "a key that nobody sent finds a stream")


async def _owners(trial: StoreTrial) -> None:
    async with trial.server() as store:
        running, finished, deleted = [await trial.begin(store, delta(1), owner="me") for _ in range(3)]
        for lease in (finished, deleted):
            await trial.finish(store, lease)
        await store.delete("me", deleted.stream_id)
        never = await trial.refused(store.read("you", "x" * 22))
        for lease in (running, finished, deleted):
            for asked in (store.read, store.stop, store.delete):
                error = await trial.refused(asked("you", lease.stream_id))
                is_same = type(error) is UnknownStream and str(error) == str(never)
                hold(is_same, f"{asked.__name__}() of another owner's stream raised {error!r}, not {never!r}")
        hold(running.log.end is None, "another owner stopped a stream")
        of_me = sorted([running.stream_id, finished.stream_id])
        hold(sorted(store.streams_of("me")) == of_me, "streams_of() does not name just the owner's streams")
        hold(store.streams_of("you") == [], "streams_of() names streams of another owner")
        error = await trial.refused(store.read("me", finished.stream_id))
        hold(error is None, f"read() of one's own stream raised {error!r}")
        error = await trial.refused(store.read("me", deleted.stream_id))
        hold(isinstance(error, StreamExpired), f"read() of one's own deleted stream raised {error!r}")


laws_of_one_server = (
    StoreLaw("numbers_are_dense", "events are read in the order of appending, numbered from 1 without a gap", _dense),
    StoreLaw("streams_are_apart", "what is appended to one stream is in no other", _apart),
    StoreLaw("one_terminal_event", "behind the terminal event nothing is kept", _one_end),
    StoreLaw("followers_see_all", "a reader gets what is kept, then what follows, then the end", _followers),
    StoreLaw("reading_has_bounds", "read() refuses what never was, and positions behind the last event", _bounds),
    StoreLaw("older_epochs_are_refused", "nothing is kept of what an older epoch appends", _old_lease),
    StoreLaw("closed_is_closed", "a store that is closed takes nothing", _closed),
    StoreLaw("retracted_is_gone", "after retract() nothing more is seen of what was appended before", _retract),
    StoreLaw("stopping_ends", "when stop() returns, the end of that stream can be read", _stop),
    StoreLaw("deleted_is_gone", "a deleted stream is gone for good, and its key is free", _delete),
    StoreLaw("keys_belong_to_owners", "recall() finds a stream by owner, key and request", _recall),
    StoreLaw("owners_are_apart", "another owner's stream is like one that never was", _owners),
)
