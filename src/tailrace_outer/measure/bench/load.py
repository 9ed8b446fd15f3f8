"""A cheap load client: uses raw sockets, counts events, and does not parse JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

__all__ = ["Round", "Sample", "Timeline", "percentile", "run_load"]

_MARKER = b"\ndata: "
_TERMINAL = b"\nevent:"  # as long as the marker, so that one tail serves both


class Round(msgspec.Struct):
    """Prompts that an engine runs at the same time: greedy, always to `max_tokens`."""

    prompts: list[tuple[int, ...]]
    max_tokens: int


@dataclass(slots=True)
class Timeline:
    """The times of a stream's events, in seconds of the monotonic clock."""

    start_s: float
    times_s: list[float] = field(default_factory=list)  # one for each read with events
    num_events: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of load."""

    num_events: int
    wall_s: float
    ttft_s: list[float]  # one per stream
    itl_s: list[float]  # gaps between reads with events

    @property
    def events_per_s(self) -> float:
        return self.num_events / self.wall_s

    @classmethod
    def of(cls, timelines: Sequence[Timeline], wall_s: float) -> Sample:
        return cls(
            num_events=sum(timeline.num_events for timeline in timelines),
            wall_s=wall_s,
            ttft_s=[timeline.times_s[0] - timeline.start_s for timeline in timelines if timeline.times_s],
            itl_s=[
                later - earlier
                for timeline in timelines
                for earlier, later in zip(timeline.times_s, timeline.times_s[1:], strict=False)
            ],
        )


def percentile(values: Sequence[float], q: float) -> float:
    """Return the value at quantile `q` (0 to 1), or NaN if there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


class _Client(asyncio.Protocol):
    def __init__(self, request: bytes, done: asyncio.Future[Timeline]) -> None:
        self._request = request
        self._done = done
        self._tail = b""
        self._terminal = 0
        self.timeline = Timeline(time.perf_counter())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.timeline.start_s = time.perf_counter()
        transport.write(self._request)  # type: ignore[attr-defined]  # uvloop's transports are of its own kind

    def data_received(self, data: bytes) -> None:
        # A marker may be split over two reads.
        chunk = self._tail + data
        self._tail = chunk[-len(_MARKER) + 1 :]
        self._terminal += chunk.count(_TERMINAL)
        num_events = chunk.count(_MARKER)
        if num_events:
            self.timeline.num_events += num_events
            self.timeline.times_s.append(time.perf_counter())

    def connection_lost(self, exc: Exception | None) -> None:
        self.timeline.num_events -= 1  # the terminal event carries no token
        if self._done.done():
            return
        if exc is not None or not self._terminal:
            self._done.set_exception(ConnectionError("a stream was cut"))
        else:
            self._done.set_result(self.timeline)


async def run_load(host: str, port: int, requests: Sequence[bytes], *, concurrency: int) -> Sample:
    """Send the requests, at most `concurrency` at a time, each on its own connection, which the server closes.

    Raises: ConnectionError if a stream ends without its terminal event.
    """
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore(concurrency)

    async def one(request: bytes) -> Timeline:
        async with slots:
            done: asyncio.Future[Timeline] = loop.create_future()
            await loop.create_connection(lambda: _Client(request, done), host, port)
            return await done

    start_s = time.perf_counter()
    timelines = await asyncio.gather(*(one(request) for request in requests))
    return Sample.of(timelines, time.perf_counter() - start_s)
