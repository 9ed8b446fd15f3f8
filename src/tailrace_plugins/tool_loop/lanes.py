"""Responses with MCP tools on the WebSocket of Responses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator, Sequence

from starlette.requests import HTTPConnection

from tailrace.dialects import JsonBody
from tailrace.errors import TailraceError
from tailrace.server import LaneStream, LaneTake, owner_of
from tailrace_plugins.tool_loop.asked import names_mcp
from tailrace_plugins.tool_loop.journal import LOOP_ID
from tailrace_plugins.tool_loop.loop import Loop
from tailrace_plugins.tool_loop.loops import Loops
from tailrace_plugins.tool_loop.model_requests import IGNORED
from tailrace_plugins.tool_loop.response_answers import WRITE_EVENTS, has_begun, keepalive

__all__ = ["LoopLanes"]


class LoopLanes(LaneTake):
    """Takes the commands that are about MCP tools."""

    def __init__(self, loops: Loops) -> None:
        self._loops = loops

    async def create(
        self, sender: HTTPConnection, body: JsonBody, key: str | None, begun: Collection[str]
    ) -> LaneStream | None:
        if not names_mcp(body):
            return None
        loop = await self._loops.begin(self._loops.asking(sender, key, begun), body)
        await has_begun(loop)
        return _LoopLane(self._loops, loop, 0)

    async def follow(self, sender: HTTPConnection, stream_id: str, number: int) -> LaneStream | None:
        if not LOOP_ID.fullmatch(stream_id):
            return None
        return _LoopLane(self._loops, await self._loops.find(owner_of(sender.scope), stream_id), number + 1)

    async def leave(self, sender: HTTPConnection, stream_ids: Collection[str]) -> None:
        if "x-tailrace-linger" in sender.headers:
            return
        for loop_id in stream_ids:
            if LOOP_ID.fullmatch(loop_id):
                with contextlib.suppress(TailraceError):  # the others are left all the same
                    await self._loops.leave(await self._loops.find(owner_of(sender.scope), loop_id))


class _LoopLane(LaneStream):
    """A response as a lane reads it, from event number `num_seen` on."""

    def __init__(self, loops: Loops, loop: Loop, num_seen: int) -> None:
        ignored = loop.headers.get(IGNORED)
        super().__init__(loop.begun.loop_id, ignored.split(", ") if ignored else ())
        self._loops = loops
        self._loop = loop
        self._num_seen = num_seen
        self._reader = contextlib.ExitStack()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with self._reader:
            self._reader.enter_context(self._loop.reading())
            yield

    async def next(self, limit_s: float) -> Sequence[bytes] | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s or None):
                await self._wait()
        loop = self._loop
        ready = loop.output.events[self._num_seen : self._num_seen + WRITE_EVENTS]
        self._num_seen += len(ready)
        if not ready and loop.has_ended:
            return None
        # An error after `response.failed` would be the answer to the next command of its lane.
        return [event.body for event in ready or keepalive(loop) if event.kind != "error"]

    async def _wait(self) -> None:
        """Return when there are more events, or the response has ended. Raises: UnknownLoop if it is deleted."""
        await self._loop.wait(self._num_seen)
        while self._loop.is_lost and len(self._loop.output.events) <= self._num_seen:
            self._reader.close()
            self._loop = await self._loop.again()
            self._reader.enter_context(self._loop.reading())
            await self._loop.wait(self._num_seen)

    async def cancel(self) -> None:
        await self._loops.cancel(self._loop)
