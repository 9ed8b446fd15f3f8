"""All responses with MCP tools: those that this server goes on with, those of other servers that are read here, and
those that are kept."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from tailrace.errors import JournalDamaged, LeaseLost, StorageError
from tailrace.server import SHUTTING_DOWN, Server, look_at_changes
from tailrace_plugins.tool_loop.beginnings import Beginnings
from tailrace_plugins.tool_loop.call_maker import CallLimits
from tailrace_plugins.tool_loop.journal import Journal
from tailrace_plugins.tool_loop.kept import KeptLoop
from tailrace_plugins.tool_loop.loop import Loop
from tailrace_plugins.tool_loop.loop_rows import Needs
from tailrace_plugins.tool_loop.mcp_errors import NotBegun, ToolServerMissing, UnknownLoop
from tailrace_plugins.tool_loop.tool_servers import ToolServers

__all__ = ["Loops"]

logger = logging.getLogger("tailrace.mcp")

_KEPT_S = 24 * 3600
_SWEEP_S = 60.0
_CLOSE_S = 5.0
_LEFT_S = 1.0  # how long a response goes on without a reader
_AGAIN_S = 1.0


class Loops:
    """Begins, finds and ends responses. Each is run by the server that has its lease: the one that began it, and after
    its death another one. Used from one event loop only."""

    def __init__(
        self,
        server: Server,
        journal: Journal,
        tool_servers: ToolServers,
        limits: CallLimits,
        most_calls: int,
        group: asyncio.TaskGroup,
    ) -> None:
        self._server = server
        self._journal = journal
        self._tool_servers = tool_servers
        self._limits = limits
        self._group = group
        self._live: dict[str, Loop] = {}
        self._unread: set[str] = set()  # of them, those of other servers that had no reader when it last looked
        self._waits: dict[str, str] = {}  # what this server lacks for responses that nobody goes on with
        self._has_changed = asyncio.Event()
        self._is_closing = self._is_closed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._cancelling: dict[str, asyncio.Task[Exception | None]] = {}  # by the ids of the responses
        self._beginnings = Beginnings(
            server, journal, tool_servers, most_calls, self._live, self.find, self.shown, self._run
        )
        self.begin = self._beginnings.begin
        self.asking = self._beginnings.asking
        self.labels = tool_servers.labels

    async def start(self) -> None:
        """Continue the responses of an earlier process, and of other servers when they die. Raises: StorageError."""
        await self._look()
        work: list[Callable[[], Awaitable[None]]] = [self._sweep, self._tool_servers.connections.sweep]
        if self._journal.is_shared:
            self._journal.table.listen(self._has_changed.set)
            work.append(partial(look_at_changes, self._has_changed, self._look, logger, "Responses"))
        self._tasks = [self._group.create_task(_safely(one)) for one in work]

    def allow_calls(self, most_calls: int) -> None:
        """Let responses that begin from now on make so many calls."""
        self._beginnings.most_calls = most_calls

    def drain(self) -> None:
        """Readers that leave from now on end no response."""
        self._is_closing = True

    async def close(self) -> None:
        """Leave everything to the next process, or to other servers, but let calls that are out come back for a short
        time."""
        self.drain()
        self._is_closed = True
        out: list[asyncio.Task[Any]] = [*self._cancelling.values()]  # Any: nobody takes it
        out += [loop.task for loop in self._live.values() if loop.task is not None and loop.hold()]
        if out:
            await asyncio.wait(out, timeout=_CLOSE_S)
        of_loops = [task for loop in self._live.values() for task in (loop.task, loop.leaving)]
        tasks = [*self._tasks, *self._cancelling.values(), *(task for task in of_loops if task is not None)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._tool_servers.connections.close()

    # What clients ask for

    async def find(self, owner: str, loop_id: str) -> Loop:
        """Return a response of an owner, with all that is kept of it.

        Raises: UnknownLoop, ToolServerMissing if no server goes on with it and this one cannot, StorageError.
        """
        loop = self._live.get(loop_id) or await self._found(owner, loop_id)
        if loop.begun.sender.owner != owner:
            raise UnknownLoop("There is no such response.", param="response_id")
        await loop.caught_up()
        return loop

    async def _found(self, owner: str, loop_id: str) -> Loop:
        """Return a response from the journal, which has ended or belongs to another server. Raises: as `find`."""
        needs = await self._journal.needs_of(owner, loop_id) if self._journal.is_shared else None
        kept = await self._journal.load(owner, loop_id)  # after that: it may end meanwhile
        if kept is not None and kept.end is not None:
            loop = self._loop_of(kept, {})
            await loop.run()
            return loop
        if kept is None or needs is None:
            raise UnknownLoop("There is no such response.", param="response_id")
        lacks = self._tool_servers.lacks(needs)
        if lacks and not await self._journal.is_held(owner, loop_id):
            raise ToolServerMissing.of(lacks)
        await self._journal.begin_reading(kept.begun)
        return self._live.get(loop_id) or self._run(kept, {})  # it may have begun to run meanwhile

    async def shown(self, owner: str, loop_id: str) -> Loop:
        """Return a response that its client may read, as `find`. One that it did not let us store is kept only for
        its Idempotency-Key, its approvals and its WebSocket."""
        loop = await self.find(owner, loop_id)
        if loop.has_ended and not (loop.begun.is_stored or loop.asked):
            raise UnknownLoop("There is no such response.", param="response_id")
        return loop

    async def cancel(self, loop: Loop) -> Loop:
        """End a response as cancelled, if it runs, at any server. Returns it as it is then. Raises: UnknownLoop,
        StorageError."""
        while not loop.has_ended:
            if loop.kept.is_ours:
                with contextlib.suppress(LeaseLost):
                    await self._cancel_own(loop)
                    break
            elif not loop.is_lost:
                await self._journal.mark_cancelled(loop.begun)
                with loop.reading():
                    await loop.ended()
            if not loop.has_ended:
                loop = await self.find(loop.begun.sender.owner, loop.begun.loop_id)
        return loop

    async def _cancel_own(self, loop: Loop) -> None:
        """End a response as cancelled that this server goes on with. It ends also if whoever asks for that is cancelled
        meanwhile. Raises: LeaseLost."""
        loop_id = loop.begun.loop_id
        task = self._cancelling.get(loop_id)
        if task is None:
            task = self._cancelling[loop_id] = self._group.create_task(self._end_own(loop))
            task.add_done_callback(lambda _: self._cancelling.pop(loop_id))
        if (error := await asyncio.shield(task)) is not None:
            raise error

    async def _end_own(self, loop: Loop) -> Exception | None:
        """Return why the response could not be cancelled. An exception would end all tasks of the server."""
        try:
            try:
                await loop.cancel()
            finally:
                self._gone(loop)
            await loop.drop_streams()
        except Exception as error:
            if isinstance(error, LeaseLost):
                loop.let_go()
            return error
        return None

    async def leave(self, loop: Loop) -> None:
        """The client of a WebSocket needs nothing more of a response, which it has begun there, or found by its
        Idempotency-Key: then it may have begun over HTTP, and is left as it is. Raises: UnknownLoop, StorageError."""
        begun = loop.begun
        if not begun.is_on_socket:
            return
        is_needed = loop.num_readers or begun.is_background or begun.body.get("conversation")
        if not is_needed and not await self._is_read_elsewhere(loop):
            loop = await self.cancel(loop)
        if loop.has_ended and not _is_kept(loop):
            await self._journal.delete(begun)

    async def delete(self, loop: Loop) -> None:
        """Cancel a response if it runs, and forget it. Raises: StorageError."""
        await self.cancel(loop)
        await self._journal.delete(loop.begun)

    async def forget(self, owner: str) -> dict[str, int]:
        """Delete all responses of an owner. Other servers stop theirs when they write the next step. Raises:
        StorageError."""
        for loop in [loop for loop in self._live.values() if loop.begun.sender.owner == owner]:
            if loop.kept.is_ours:
                with contextlib.suppress(LeaseLost):
                    await self._cancel_own(loop)
        return {"tool_loops": await self._journal.forget(owner)}

    # Responses of other servers

    async def _look(self) -> None:
        """Go on with the responses that no other server goes on with, and learn what others have done. Raises:
        StorageError."""
        live_before = list(self._live.values())
        unfinished = await self._journal.unfinished()
        for loop in live_before:
            await self._refresh(loop, is_open=loop.begun.loop_id in unfinished)
        loops = [(needs.owner, loop_id) for loop_id, needs in unfinished.items()]
        cancelled = await self._journal.are_cancelled(loops) if self._journal.is_shared else set()
        self._waits = {loop_id: lacks for loop_id, lacks in self._waits.items() if loop_id in unfinished}
        for loop_id, needs in unfinished.items():
            live = self._live.get(loop_id)
            if live is None or not live.kept.is_ours:
                await self._take(loop_id, needs, is_cancelled=loop_id in cancelled)
            elif loop_id in cancelled and not live.has_ended:
                with contextlib.suppress(LeaseLost):
                    await self._cancel_own(live)

    async def _refresh(self, loop: Loop, *, is_open: bool) -> None:
        """Read what another server has added, unless nobody reads it here. One that is not open any more has an end to
        read, or was deleted. Raises: StorageError."""
        loop_id = loop.begun.loop_id
        try:
            loop.kept.check()
            if loop.kept.is_ours:
                return
            if loop.num_readers or loop_id not in self._unread:
                self._unread.discard(loop_id)
                if not loop.num_readers:
                    self._unread.add(loop_id)
                await loop.kept.refresh()
                if is_open or loop.kept.end is not None:
                    return
                if not loop.is_begun:  # requests with its Idempotency-Key wait for that
                    text = "The server that began this response was refused, or the response was deleted. Try again."
                    loop.refusal = NotBegun(text, retry_after_s=_AGAIN_S)
            else:
                await self._journal.end_reading(loop.begun)
        except (LeaseLost, JournalDamaged):
            pass
        self._gone(loop)
        loop.let_go()

    async def _take(self, loop_id: str, needs: Needs, *, is_cancelled: bool) -> None:
        """Go on with a response, if no other server does, and this one can. Raises: StorageError."""
        lacks = self._tool_servers.lacks(needs) if self._journal.is_shared else ""
        if lacks and not is_cancelled:
            if self._waits.get(loop_id) != lacks and not await self._journal.is_held(needs.owner, loop_id):
                self._waits[loop_id] = lacks
                logger.warning("A response with MCP tools waits for another server: this one does not have %s.", lacks)
            return
        loop = self._live.get(loop_id)
        kept = loop.kept if loop is not None else await self._journal.load(needs.owner, loop_id)
        if self._is_closing or loop_id in self._beginnings.starting:
            return
        if loop is not None and is_cancelled:
            loop.is_cancelled = True
        try:
            if kept is None:
                if await self._journal.close_damaged(needs.owner, loop_id):
                    logger.error("A response with MCP tools does not go on: a step of it is damaged or lost.")
                return
            if not await self._journal.take(kept):
                return
        except (LeaseLost, JournalDamaged):
            return
        if loop is None and loop_id not in self._live:
            self._run(kept, {}).is_cancelled = is_cancelled

    # Running

    def _loop_of(self, kept: KeptLoop, headers: Mapping[str, Mapping[str, str]]) -> Loop:
        return Loop(kept, self._server, self._tool_servers.connect(kept.begun, headers), self._limits)

    def _run(self, kept: KeptLoop, headers: Mapping[str, Mapping[str, str]]) -> Loop:
        """Raises: StorageError if this server begins no more. Another one does."""
        if self._is_closed:
            raise StorageError(SHUTTING_DOWN)
        loop = self._loop_of(kept, headers)
        if (reading := self._live.get(kept.begun.loop_id)) is not None:
            reading.let_go()  # a request found it after its rows were written, and before this
        self._live[kept.begun.loop_id] = loop
        loop.on_left = self._left
        loop.again = partial(self._again, loop)
        loop.task = self._group.create_task(_safely(partial(self._ended, loop)))
        return loop

    async def _again(self, loop: Loop) -> Loop:
        """Find a response that this server has lost. While it cannot be found, this waits. Raises: UnknownLoop."""
        while True:
            try:
                return await self.find(loop.begun.sender.owner, loop.begun.loop_id)
            except (StorageError, ToolServerMissing):
                await asyncio.sleep(_AGAIN_S)

    async def _ended(self, loop: Loop) -> None:
        await loop.run()
        has_no_use = loop.refusal is not None or not (_is_kept(loop) or loop.begun.is_on_socket)
        if has_no_use and loop.kept.is_ours and not loop.is_lost:
            with contextlib.suppress(StorageError):
                await self._journal.delete(loop.begun)
        self._gone(loop)

    def _gone(self, loop: Loop) -> None:
        loop_id = loop.begun.loop_id
        if self._live.get(loop_id) is loop:
            del self._live[loop_id]
        self._unread.discard(loop_id)
        if loop.leaving is not None:
            loop.leaving.cancel()

    def _left(self, loop: Loop) -> None:
        """The last reader has left."""
        if not self._is_closing and loop.kept.is_ours:
            loop.leaving = self._group.create_task(_safely(partial(self._cancel_unread, loop)))

    async def _cancel_unread(self, loop: Loop) -> None:
        await asyncio.sleep(max(_LEFT_S, loop.begun.linger_s))
        while await self._is_read_elsewhere(loop):
            await asyncio.wait([loop.task] if loop.task is not None else (), timeout=_LEFT_S)
        loop.leaving = None
        if not (self._is_closing or loop.num_readers or loop.is_over) and loop.kept.is_ours:
            with contextlib.suppress(LeaseLost):
                await self._cancel_own(loop)

    async def _is_read_elsewhere(self, loop: Loop) -> bool:
        if not self._journal.is_shared or loop.is_over:
            return False
        try:
            return await self._journal.is_read(loop.begun)
        except StorageError:
            return True  # nobody knows

    async def _sweep(self) -> None:
        """Delete responses that are kept for too long. Never returns."""
        while True:
            try:
                await self._journal.delete_older(time.time() - _KEPT_S, self._live)
            except StorageError as error:
                logger.warning("Expired responses are not deleted: %s", error.message)
            except Exception:  # a defect must not end the server
                logger.exception("Expired responses are not deleted.")
            await asyncio.sleep(_SWEEP_S)


def _is_kept(loop: Loop) -> bool:
    """Return whether somebody may need a response after its end, whatever became of its connection."""
    return bool(loop.begun.is_stored or loop.asked or loop.begun.claim)


async def _safely(work: Callable[[], Awaitable[None]]) -> None:
    """A defect must end only this work."""
    try:
        await work()
    except Exception:
        logger.exception("A response with MCP tools failed.")
