"""What a log store owes the server that comes next."""

from __future__ import annotations

from contextlib import suppress

from tailrace.errors import ModelError, StreamExpired, UnknownStream
from tailrace.streams import Claim, Lease, LogStore
from tailrace.testing._store_trial import DONE, StoreLaw, StoreTrial, delta, hold
from tailrace.types import ANONYMOUS

__all__ = ["laws_of_the_next_server"]


async def _opened(trial: StoreTrial) -> None:
    async with trial.server() as store:
        lease = await trial.begin(store, claim=Claim("key", b"request"), owner="me")
        async with trial.after_kill() as following:
            taken = await following.take_over()
            records = [one.log.record for one in taken]
            hold(records == [lease.log.record], f"{lease.log.record} was opened, and the next server has {records}")
            found = await following.recall("me", Claim("key", b"request"))
            hold(found is taken[0].log, "the key of a stream that was opened does not find it")


async def _seen(trial: StoreTrial) -> None:
    async with trial.server() as store:
        lease = await trial.begin(store)
        for number in range(1, 6):
            store.append(lease, (delta(number),))
            await _hold_kept(trial, lease)  # what can be read already
            await trial.seen(lease.log, number)
            await _hold_kept(trial, lease)


async def _hold_kept(trial: StoreTrial, lease: Lease) -> None:
    seen = list(lease.log.events)
    async with trial.after_kill() as following:
        (taken,) = await following.take_over()
        kept = taken.log.events[: len(seen)]
        hold(kept == seen, f"{seen} could be read when the server was killed, and the next one has {kept}")


async def _epochs(trial: StoreTrial) -> None:
    epochs = []
    for _ in range(3):
        async with trial.server() as store:
            epochs.append(store.epoch)
    hold(epochs == sorted(set(epochs)), f"one server after the other had the epochs {epochs}")


async def _fenced(trial: StoreTrial) -> None:
    async with trial.server() as first:
        old = await trial.begin(first, delta(1))
    async with trial.server() as second:
        (lease,) = await second.take_over()
        await trial.try_append(first, old, delta(2))
        await trial.try_append(second, old, delta(3))
        await trial.settle(second)
        second.append(lease, (delta(4),))
        await trial.seen(lease.log, 2)
        log = await second.read(ANONYMOUS, old.stream_id)
        hold(log.events == [delta(1), delta(4)], f"after a take-over the old lease appended: {log.events}")
        async with trial.after_kill() as following:
            kept = {one.stream_id: one.log.events for one in await following.take_over()}.get(old.stream_id)
            hold(kept == [delta(1), delta(4)], f"the next server has {kept}")


async def _once(trial: StoreTrial) -> None:
    async with trial.server() as store:
        begun = [await trial.begin(store, *map(delta, range(1, count))) for count in (4, 1, 3, 2)]
        await trial.finish(store, begun[2])
        expected = [lease.stream_id for lease in begun if lease.log.end is None]
    for _ in range(2):  # they are handed out again when that server is gone, too
        async with trial.server() as store:
            taken = [lease.stream_id for lease in await store.take_over()]
            hold(taken == expected, f"of the streams {expected} the next server got {taken}")
            again = [lease.stream_id for lease in await store.take_over()]
            hold(not again, f"asked a second time, it got {again}")
            with suppress(ModelError):  # a home may be one server's alone
                async with trial.server() as other:
                    stolen = [lease.stream_id for lease in await other.take_over()]
                    hold(not stolen, f"a second server got {stolen} as well")


async def _goes_on(trial: StoreTrial) -> None:
    expected = []
    async with trial.server() as store:
        lease = await trial.begin(store)
        stream_id = lease.stream_id
    for number in range(1, 7, 2):
        async with trial.server() as store:
            (lease,) = await store.take_over()
            store.append(lease, (delta(number), delta(number + 1)))
            expected += [delta(number), delta(number + 1)]
            await trial.seen(lease.log, len(expected))
            log = await store.read(ANONYMOUS, stream_id)
            hold(log.events == expected, f"a stream that went on has {log.events}, not {expected}")


async def _finished(trial: StoreTrial) -> None:
    claim = Claim("key", b"request")
    async with trial.server() as store:
        lease = await trial.begin(store, delta(1), owner="me", claim=claim)
        await trial.finish(store, lease)
        deleted = await trial.begin(store, delta(1), owner="me")
        await trial.finish(store, deleted)
        await store.delete("me", deleted.stream_id)
        async with trial.after_kill() as following:
            await _hold_finished(trial, following, lease, deleted, claim)
    async with trial.server() as following:
        await _hold_finished(trial, following, lease, deleted, claim)


async def _hold_finished(trial: StoreTrial, store: LogStore, lease: Lease, deleted: Lease, claim: Claim) -> None:
    taken = [one.stream_id for one in await store.take_over()]
    hold(not taken, f"streams that had ended were handed out: {taken}")
    for stream_id in (lease.stream_id, deleted.stream_id):
        for other in ("you", ANONYMOUS):
            error = await trial.refused(store.read(other, stream_id))
            hold(type(error) is UnknownStream, f"read() of another owner's stream raised {error!r}")
    error = await trial.refused(store.read("me", deleted.stream_id))
    hold(isinstance(error, StreamExpired), f"read() of one's own deleted stream raised {error!r}")
    log = await store.read("me", lease.stream_id)
    hold(log.events == [delta(1), DONE], f"of {[delta(1), DONE]} the next server has {log.events}")
    hold(log.record.memo == b"a memo", f"its memo is {log.record.memo!r}")
    hold(await store.recall("me", claim) is log, "its key does not find it")
    hold(await store.recall("you", claim) is None, "its key finds it for another owner")


laws_of_the_next_server = (
    StoreLaw("opened_is_kept", "when open() returns, the next server would find the stream", _opened, durable=True),
    StoreLaw("seen_is_kept", "nobody has seen what the next server would not find", _seen, durable=True),
    StoreLaw("epochs_grow", "each server has a larger epoch than those before it", _epochs, durable=True),
    StoreLaw("old_owners_are_refused", "whose stream was taken over appends nothing to it", _fenced, durable=True),
    StoreLaw("taken_over_once", "each stream without an end is handed out once, oldest first", _once, durable=True),
    StoreLaw("streams_go_on", "what the next server appends follows what is there", _goes_on, durable=True),
    StoreLaw("finished_is_kept", "the next server shows finished streams, to their owner", _finished, durable=True),
)
