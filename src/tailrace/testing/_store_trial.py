"""What a law of log stores is, and what it has to work with."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from tailrace.errors import LeaseLost, TailraceError
from tailrace.streams import Claim, Lease, LogStore, Reader, Record, StreamLog, new_stream_id
from tailrace.testing._trial import under_law
from tailrace.types import ANONYMOUS, End, Event, Failure, Prompt, Sampling, TextDelta, Usage

__all__ = [
    "DONE",
    "MakeStore",
    "Snapshot",
    "StoreLaw",
    "StoreProducer",
    "StoreTrial",
    "copy_directory",
    "delta",
    "hold",
]

MakeStore = Callable[[Path], AbstractAsyncContextManager[LogStore]]
Snapshot = Callable[[Path, Path], None]

DONE = End("done", Usage(2, 3))
_PATIENCE_S = 5.0


def hold(is_held: bool, seen: str) -> None:
    """Raises: AssertionError that says what was seen."""
    if not is_held:
        raise AssertionError(seen)


def delta(number: int) -> TextDelta:
    return TextDelta(f" word {number}", (number,))


def copy_directory(source: Path, target: Path) -> None:
    """What is on disk of a server that runs, as one would find it that comes after `kill -9`."""
    shutil.copytree(source, target, dirs_exist_ok=True)


class StoreProducer:
    """The producer of a stream: when it is stopped, it ends as cancelled; when it has ended, its retention begins."""

    status = "running"

    def __init__(self, store: LogStore, lease: Lease) -> None:
        self._store = store
        self._lease = lease
        lease.log.producer = self

    def cancel(self) -> None:
        self._store.append(self._lease, (End("cancelled", Usage(2, 0), Failure("cancelled", "It was stopped.")),))

    def read(self) -> None:
        pass

    def unread(self) -> None:
        pass

    def ended(self) -> None:
        self._store.end(self._lease)


class StoreTrial:
    """A home of its own, and servers over it one after the other."""

    def __init__(self, make: MakeStore, snapshot: Snapshot, directory: Path) -> None:
        self._make = make
        self._snapshot = snapshot
        self._directory = directory
        self._num_copies = 0
        self._home = directory / "home"
        self._home.mkdir()

    def server(self) -> AbstractAsyncContextManager[LogStore]:
        """The next server, when the last one has left."""
        return self._make(self._home)

    def after_kill(self) -> AbstractAsyncContextManager[LogStore]:
        """The next server, if the one that runs were killed now. That one runs on."""
        self._num_copies += 1
        copy = self._directory / f"copy-{self._num_copies}"
        self._snapshot(self._home, copy)
        return self._make(copy)

    async def begin(self, store: LogStore, *events: Event, owner: str = ANONYMOUS, claim: Claim | None = None) -> Lease:
        """A stream with a producer and these events, once they can be read."""
        record = Record(
            new_stream_id(),
            1.5,
            model="a model",
            memo=b"a memo",
            prompts=(Prompt("Once", (1, 2)),),
            sampling=Sampling(seed=7, max_tokens=100),
            num_prompt_tokens=2,
            linger_s=60.0,
            claim=claim,
            owner=owner,
        )
        lease = await store.open(record)
        StoreProducer(store, lease)
        if events:
            store.append(lease, events)
            await self.seen(lease.log, len(events))
        return lease

    async def finish(self, store: LogStore, lease: Lease) -> None:
        """The terminal event, once it can be read."""
        store.append(lease, (DONE,))
        await self.seen(lease.log, lease.log.last_seq + 1)

    async def seen(self, log: StreamLog, count: int) -> None:
        """Return when so many events can be read."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while log.last_seq < count and log.end is None:
                    await Reader(log, log.last_seq).wait()
        except TimeoutError:
            raise AssertionError(f"event {count} cannot be read after {_PATIENCE_S:.0f} s") from None

    async def settle(self, store: LogStore) -> None:
        """Return when all that was appended before has been kept or refused: what comes after it can be read."""
        await self.begin(store, delta(0))

    async def try_append(self, store: LogStore, lease: Lease, *events: Event) -> None:
        """Append what should be refused: at once, or by never being seen."""
        try:
            store.append(lease, events)
            store.flush()
        except LeaseLost:
            pass

    async def refused(self, asked: Awaitable[object]) -> TailraceError | None:
        """What it raised."""
        try:
            await asked
        except TailraceError as error:
            return error
        return None


@dataclass(frozen=True, slots=True)
class StoreLaw:
    """One promise of `LogStore`. Called with a way to open a store, it passes or raises. It runs an event loop.

    Raises: AssertionError that names the law and says what was seen; whatever the store raises.
    """

    name: str
    promise: str  # for people
    check: Callable[[StoreTrial], Awaitable[None]]
    durable: bool = False  # says nothing of a store that is not

    def __call__(self, make: MakeStore, *, snapshot: Snapshot = copy_directory) -> None:
        with tempfile.TemporaryDirectory() as directory:
            first = Path(directory) / "first"
            first.mkdir()
            asyncio.run(self._hold(make, StoreTrial(make, snapshot, Path(directory)), first))

    async def _hold(self, make: MakeStore, trial: StoreTrial, first: Path) -> None:
        if self.durable and not await _is_durable(make, first):
            return
        with under_law(self.name, self.promise):
            await self.check(trial)

    def __str__(self) -> str:
        return self.name


async def _is_durable(make: MakeStore, directory: Path) -> bool:
    async with make(directory) as store:
        return store.is_durable
