"""Runs one response: turns of the model, and the calls of tools between them.

It runs the same way from its start each time. What is kept already, it takes from there; what is not, it does and
keeps. Before a call goes out, this is kept, too. So after a crash the response goes on, and a call is made a second
time only if the tool says that this does no harm. Where another server does it, it waits until that is kept, or until
this server is to go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import msgspec

from tailrace.dialects import JsonBody
from tailrace.errors import LeaseLost, StorageError, TailraceError
from tailrace.server import Server
from tailrace_plugins.tool_loop.call_maker import CallLimits, Calls
from tailrace_plugins.tool_loop.kept import KeptLoop
from tailrace_plugins.tool_loop.loop_output import ModelTurn, Output
from tailrace_plugins.tool_loop.loop_rows import (
    Called,
    Ended,
    Planned,
    call_item,
    output_item,
)
from tailrace_plugins.tool_loop.mcp_connections import protocol_error, unknown_outcome
from tailrace_plugins.tool_loop.model_requests import LoopModel, body_of_turn
from tailrace_plugins.tool_loop.model_turns import Turns
from tailrace_plugins.tool_loop.tool_servers import Connect

__all__ = ["Loop"]

logger = logging.getLogger("tailrace.mcp")


class Loop:
    """A response with MCP tools, which this server goes on with or shows. `is_lost`: neither, from now on. `again` then
    finds it anew."""

    def __init__(self, kept: KeptLoop, server: Server, connect: Connect, limits: CallLimits) -> None:
        begun = kept.begun
        self.begun = begun
        self.kept = kept
        self.output = Output(begun)
        self.said = list(begun.said)  # all items so far, as the next turn of the model has them
        self.asked: list[Planned] = []  # calls that wait for an approval
        self.results: dict[str, Called] = {}  # of the calls, by their `unique_id`
        self.has_ended = self.is_lost = False
        self.is_cancelled = False  # whether it is to end as soon as this server goes on with it
        self.is_waiting = False  # for another server
        self.refusal: TailraceError | None = None  # why the response has not begun at all
        self.num_readers = 0
        self.task: asyncio.Task[None] | None = None
        self.leaving: asyncio.Task[None] | None = None  # ends the response unless a reader comes
        self.on_left: Callable[[Loop], None] = lambda loop: None
        self.again: Callable[[], Coroutine[Any, Any, Loop]]  # Any: nothing is sent to it
        self._calls = Calls(kept, connect, limits)
        self._num_waiting = 0
        self._changed = asyncio.Event()
        self._fresh = list(begun.said)  # of `said`, what the conversation does not have
        self._num_calls = 0
        self._model = LoopModel(begun, server, lambda: self._can_refuse)
        self._turns = Turns(kept, self._model, self.output, self._wake)
        self._running: tuple[ModelTurn, int] | None = None  # the turn that runs here

    # For readers

    async def wait(self, num_seen: int) -> None:
        """Return when there are more events than a reader has seen, or the response has ended here."""
        while len(self.output.events) <= num_seen and not self.is_over:
            await self._changed.wait()

    async def ended(self) -> None:
        """Return when the response has ended here, or does not begin."""
        while not self.is_over:
            await self.wait(len(self.output.events))

    async def caught_up(self) -> None:
        """Return when it shows all that is kept."""
        while not (self.is_over or self.is_waiting or self.kept.is_ours):
            await self._changed.wait()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Context of a reader. A response that nobody reads any more is cancelled, unless it runs in the background."""
        self.num_readers += 1
        if self.leaving is not None:
            self.leaving.cancel()
        try:
            yield
        finally:
            self.num_readers -= 1
            if not (self.num_readers or self.is_over or self.begun.is_background):
                self.on_left(self)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of the request that began the response, which gets its refusal if it does not begin."""
        self._num_waiting += 1
        try:
            with self.reading():
                yield
        finally:
            self._num_waiting -= 1

    @property
    def _can_refuse(self) -> bool:
        return bool(self._num_waiting) and not self.is_begun

    def response(self) -> JsonBody:
        """Return the response object as it is now."""
        if self.has_ended:
            return self.output.last
        return self.output.response("in_progress")

    @property
    def headers(self) -> Mapping[str, str]:
        """Of the answer."""
        return self._model.headers

    @property
    def is_begun(self) -> bool:
        return bool(self.output.events)

    @property
    def is_over(self) -> bool:
        """Whether no more events come: it has ended, or goes on elsewhere."""
        return self.has_ended or self.is_lost

    def let_go(self) -> None:
        """Do nothing more for it: another server goes on with it, or nobody reads it here."""
        self.is_lost = True
        if self.task is not None:
            self.task.cancel()
        self._wake()

    def hold(self) -> bool:
        """Begin no more calls, and return whether one is out."""
        self._calls.is_held = True
        return self._calls.is_out

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # Running

    async def run(self) -> None:
        """Run the response to its end. A cancelled task leaves it to the next process."""
        try:
            await self._run_safely()
        except LeaseLost:  # another server goes on with it
            self.is_lost = True
            self._wake()

    async def _run_safely(self) -> None:
        """Raises: LeaseLost."""
        try:
            await self._run()
        except LeaseLost:
            raise
        except Exception:  # a defect must end only this response
            logger.exception("A response with MCP tools failed.")
            error = {"code": "internal_error", "message": "Internal server error. See the server's log."}
            await self._finish("failed", error)

    async def cancel(self) -> None:
        """End the response as cancelled, which this server goes on with. A call that is out may be done, or not.
        Raises: LeaseLost."""
        if self.task is not None:
            if not self.is_cancelled:  # else it ends by itself
                self.is_cancelled = True
                self.task.cancel()
            await asyncio.wait([self.task])
        if self.has_ended:
            return
        if self._running is not None:
            await self._stop(*self._running)
        await self._finish("cancelled", None)

    async def _run(self) -> None:
        if self.begun.decided:
            self._open()
        for call in self.begun.decided:
            if call.is_again:
                self._say(call_item(call.call_id, call.label, call.name, call.arguments), is_fresh=True)
            self.output.begin_call(call)
            self._wake()
            await self._do(call)
        number = 0
        while not self._is_blocked:
            turn = await self._turn(number)
            if turn is None:
                return
            self.said += turn.said
            self._fresh = []
            if not turn.is_complete:
                await self._finish_as(turn)
                return
            self.asked += turn.asked
            for call in turn.calls:
                await self._do(call)
            if not turn.calls or turn.asked or turn.has_own_calls:
                break
            number += 1
        for call in self.asked:
            if call.is_again:
                self.output.ask(call)
        if await self._may_go_on(lambda: self.kept.end) and self._fresh:
            await self._model.add_to_conversation(self._fresh)  # no turn of the model brings them there
        await self._finish("completed", None)

    @property
    def _is_blocked(self) -> bool:
        """Whether the user has to say what to do: the outcome of a call is not known."""
        return any(one.is_unknown for one in self.results.values())

    def _open(self) -> None:
        if not self.is_begun:
            self.output.open()
            self._wake()

    def _say(self, *items: JsonBody, is_fresh: bool) -> None:
        self.said += items
        if is_fresh:
            self._fresh += items

    async def _may_go_on(self, is_kept: Callable[[], object]) -> bool:
        """Return whether this server is to do what comes next. If not, it is kept, or the response has ended, or is to
        end now."""
        return await self._is_next(is_kept) and not self.is_cancelled

    async def _is_next(self, is_kept: Callable[[], object]) -> bool:
        """Return whether this server is to say what comes next: it is not kept, and the response has not ended."""
        while not (is_kept() or self.kept.end or self.kept.is_ours):
            self.is_waiting = True
            self._wake()
            await self.kept.changed()
        self.is_waiting = False
        return not is_kept() and self.kept.end is None

    async def _finish_as(self, turn: ModelTurn) -> None:
        final = turn.final or {}
        await self._finish(final.get("status", "failed"), final.get("error"))

    async def _finish(self, status: str, error: JsonBody | None) -> None:
        """End the response, as it ended before if this is kept."""
        if await self._is_next(lambda: self.kept.end):
            if self.is_cancelled:
                status, error = "cancelled", None
            await self.kept.add(*self._turns.packed(), Ended(status, error))
        elif self.kept.end is not None:
            status, error = self.kept.end.status, self.kept.end.error
        self._open()
        self.output.close(status, error)
        self.has_ended = True
        self._wake()

    # Calls of tools

    async def _do(self, call: Planned) -> None:
        """Show the result of a call: the one that is kept, or that of a call now."""
        self._num_calls += 1
        called = self.kept.called
        if await self._may_go_on(lambda: called.get(call.item_id) or call.known):
            try:
                result = await self._calls.make(call, self._why_no_call)
                await self.kept.add(result)
            finally:
                self._calls.is_out = False
            if self._calls.is_held:
                raise asyncio.CancelledError  # the next process goes on
        elif (known := called.get(call.item_id) or call.known) is not None:
            result = known
        else:
            self._leave_open(call)
            return
        if result.item_id != call.item_id:
            result = msgspec.structs.replace(result, item_id=call.item_id)
        self.results[call.unique_id] = result
        self.output.end_call(result)
        self._wake()
        self._say(output_item(call.call_id, result.text), is_fresh=True)
        if result.is_unknown:
            again = msgspec.structs.replace(
                call,
                unique_id=f"{self._hex}_again_{len(self.asked)}",
                call_id=f"{call.call_id}_again",
                is_again=True,
                approval_id=None,
            )
            self.asked.append(again)

    def _leave_open(self, call: Planned) -> None:
        """The response has ended without the result of this call. It stays so, whoever reads it."""
        result = Called(item_id=call.item_id, error=protocol_error("The tool was not called."))
        if self.kept.calling[call.item_id]:
            result = unknown_outcome(call.item_id, "The response ended during this call.")
            self.results[call.unique_id] = result
        self._say(output_item(call.call_id, result.text), is_fresh=True)

    @property
    def _why_no_call(self) -> str | None:
        if self._is_blocked:
            return "what came of the call before is not known"
        if self._num_calls > self.begun.most_calls:
            return f"a response makes at most {self.begun.most_calls} calls"
        return None

    # Turns of the model

    async def _turn(self, number: int) -> ModelTurn | None:
        """Return a turn that has ended: the one that is kept, or one that runs now. None: the response has ended."""
        turn = ModelTurn(f"{self._hex}_{number}")
        turns = self.kept.turns
        may_go_on = await self._may_run(turn, number)
        if number < len(turns):
            await self._turns.show(turn, number)
            return turn
        if not may_go_on:
            if self.kept.end is None:
                await self._stop(turn, number)
            await self._finish("", None)
            await self.drop_streams()
            return None
        self._running = turn, number
        await self._turns.run(turn, number, self._body(number))
        if turn.final is None:
            if self._can_refuse:
                self.refusal, self.has_ended = self._model.refusal, True
                self._wake()
            else:
                await self._finish("failed", self._model.failure)
            return None
        self._running = None
        await self.kept.add(*self._turns.packed())  # a cancel meanwhile keeps it once
        await self.drop_streams()
        return turn

    async def _may_run(self, turn: ModelTurn, number: int) -> bool:
        """Return whether this server is to run a turn. As long as another one does, show it as it comes."""

        def is_kept() -> bool:
            return number < len(self.kept.turns)

        if self.kept.is_ours or self.kept.end is not None or is_kept():
            return await self._may_go_on(is_kept)
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self._turns.follow(turn, number, self._body(number)))
            may_go_on = await self._may_go_on(is_kept)
            following.cancel()
        return may_go_on

    async def _stop(self, turn: ModelTurn, number: int) -> None:
        self._running = None
        await self._turns.stop(turn, number, self._body(number))

    def _body(self, number: int) -> JsonBody:
        may_call = self._num_calls < self.begun.most_calls
        if self.begun.body.get("conversation") is None:
            return body_of_turn(self.begun, number, self.said, may_call=may_call)
        return body_of_turn(self.begun, number, self._fresh, may_call=may_call)

    @property
    def _hex(self) -> str:
        return self.begun.loop_id.removeprefix("mcp_")

    async def drop_streams(self) -> None:
        """End the streams of turns, and delete them: what matters of them is kept here. A conversation still reads its
        own."""
        with contextlib.suppress(StorageError):
            await self._model.end_streams(are_kept=self.begun.body.get("conversation") is not None)
