"""A law of log stores, and the tools that laws use."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from tailrace.errors import LeaseLost, TailraceError
from tailrace.streams import Lease, LogStore, Producer, Reader, StreamLog
from tailrace.types import (
    ANONYMOUS,
    Claim,
    End,
    Event,
    Failure,
    Prompt,
    Record,
    Sampling,
    TextDelta,
    Usage,
    new_stream_id,
)
from tailrace_outer.testing._harness import under_law

__all__ = [
    "DONE",
    "MakeStore",
    "Snapshot",
    "StoreHarness",
    "StoreLaw",
    "StoreProducer",
    "copy_directory",
    "delta",
    "require",
]

MakeStore = Callable[[Path], AbstractAsyncContextManager[LogStore]]
Snapshot = Callable[[Path, Path], None]

DONE = End("done", Usage(2, 3))
_TIMEOUT_S = 5.0


def require(condition: bool, seen: str) -> None:
    """Raises: AssertionError with the text `seen` if the condition is false."""
    if not condition:
        raise AssertionError(seen)


def delta(number: int) -> TextDelta:
    return TextDelta(f" word {number}", (number,))


def copy_directory(source: Path, target: Path) -> None:
    """Copy the directory of a running server as it is on disk, as after `kill -9`."""
    shutil.copytree(source, target, dirs_exist_ok=True)


class StoreProducer(Producer):
    """The producer of a stream. `cancel` ends it as cancelled."""

    def __init__(self, store: LogStore, lease: Lease) -> None:
        self._store = store
        self._lease = lease
        lease.log.producer = self

    def cancel(self) -> None:
        self._store.append(self._lease, (End("cancelled", Usage(2, 0), Failure("cancelled", "It was stopped.")),))

    def lease_lost(self) -> None:
        self._lease.log.release(LeaseLost("Another server writes this stream now."))


class StoreHarness:
    """A new storage location, and servers that use it one after the other."""

    def __init__(self, make: MakeStore, snapshot: Snapshot, directory: Path) -> None:
        self._make = make
        self._snapshot = snapshot
        self._directory = directory
        self._num_copies = 0
        self._home = directory / "home"
        self._home.mkdir()

    def server(self) -> AbstractAsyncContextManager[LogStore]:
        """Return the next server. The last one must be closed."""
        return self._make(self._home)

    def after_kill(self) -> AbstractAsyncContextManager[LogStore]:
        """Return a server over a copy, as if the running one were killed now. The running one continues."""
        self._num_copies += 1
        copy = self._directory / f"copy-{self._num_copies}"
        self._snapshot(self._home, copy)
        return self._make(copy)

    async def begin(
        self,
        store: LogStore,
        *events: Event,
        owner: str = ANONYMOUS,
        claim: Claim | None = None,
        wire: str = "",
        topics: tuple[str, ...] = (),
        created_s: float = 1.5,
    ) -> Lease:
        """Return a new stream with a producer, when these events can be read."""
        record = Record(
            new_stream_id(),
            created_s,
            model="a model",
            memo=b"a memo",
            prompts=(Prompt("Once", ((1, 2),)),),
            sampling=Sampling(seed=7, max_tokens=100),
            num_prompt_tokens=2,
            linger_s=60.0,
            claim=claim,
            owner=owner,
            wire=wire,
            topics=topics,
        )
        lease = await store.open(record)
        StoreProducer(store, lease)
        if events:
            store.append(lease, events)
            await self.wait_for(lease.log, len(events))
        return lease

    async def finish(self, store: LogStore, lease: Lease) -> None:
        """Append the terminal event, and return when it can be read."""
        store.append(lease, (DONE,))
        await self.wait_for(lease.log, lease.log.last_seq + 1)

    async def wait_for(self, log: StreamLog, count: int) -> None:
        """Return when this many events can be read, or the stream has ended."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while log.last_seq < count and log.end is None:
                    await Reader(log, log.last_seq).wait()
        except TimeoutError:
            raise AssertionError(f"event {count} cannot be read after {_TIMEOUT_S:.0f} s") from None

    async def settle(self, store: LogStore) -> None:
        """Return when all earlier events were kept or refused: a later event can be read."""
        await self.begin(store, delta(0))

    async def try_append(self, store: LogStore, lease: Lease, *events: Event) -> None:
        """Append events that the store should refuse, with an error or silently."""
        try:
            store.append(lease, events)
            await asyncio.sleep(0)
        except LeaseLost:
            pass

    async def error_of(self, call: Awaitable[object]) -> TailraceError | None:
        """Return the error that a call raised, or None."""
        try:
            await call
        except TailraceError as error:
            return error
        return None


@dataclass(frozen=True, slots=True)
class StoreLaw:
    """One promise of `LogStore`. Called with a way to open a store, it passes or raises. It runs an event loop.

    Raises: AssertionError that names the law and says what was seen; whatever the store raises.
    """

    name: str
    promise: str  # the law in words
    check: Callable[[StoreHarness], Awaitable[None]]
    durable: bool = False  # applies only to durable stores

    def __call__(self, make: MakeStore, *, snapshot: Snapshot = copy_directory) -> None:
        with tempfile.TemporaryDirectory() as directory:
            first = Path(directory) / "first"
            first.mkdir()
            asyncio.run(self._check(make, StoreHarness(make, snapshot, Path(directory)), first))

    async def _check(self, make: MakeStore, harness: StoreHarness, first: Path) -> None:
        if self.durable and not await _is_durable(make, first):
            return
        with under_law(self.name, self.promise):
            await self.check(harness)

    def __str__(self) -> str:
        return self.name


async def _is_durable(make: MakeStore, directory: Path) -> bool:
    async with make(directory) as store:
        return store.state.is_durable
