"""Makes the calls of one response. Before a call goes out, this is kept."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from tailrace.dialects import JsonBody
from tailrace.errors import RequestError
from tailrace_plugins.tool_loop.kept import KeptLoop
from tailrace_plugins.tool_loop.loop_rows import Called, Planned
from tailrace_plugins.tool_loop.mcp_connections import protocol_error, unknown_outcome
from tailrace_plugins.tool_loop.tool_servers import Connect

__all__ = ["CallLimits", "Calls"]

_MOST_TRIES = 3  # of a call that may be repeated


@dataclass(slots=True)
class CallLimits:
    """Of each call of a tool. They may change while calls are made."""

    call_s: float
    result_bytes: int


class Calls:
    """One after the other. `is_held`: none goes out any more."""

    def __init__(self, kept: KeptLoop, connect: Connect, limits: CallLimits) -> None:
        self.is_held = self.is_out = False
        self._kept = kept
        self._connect = connect
        self._limits = limits

    async def make(self, call: Planned, why_not: str | None) -> Called:
        """Return the result of a call, or why it is not made, such as `why_not`. If it went out already, and the tool
        does not say that a second call does no harm, nobody knows its result. Raises: LeaseLost, and CancelledError if
        it is for the next process."""
        tool = self._kept.begun.tool(call.label, call.name)
        num_tries = self._kept.calling[call.item_id]
        if num_tries and (tool is None or not tool.may_repeat or num_tries >= _MOST_TRIES):
            return unknown_outcome(call.item_id, "The server was stopped during this call.")
        arguments = _arguments_of(call)
        if tool is None:
            why_not = "its server does not have it"
        elif arguments is None:
            why_not = why_not or "its arguments are no JSON object"
        if why_not is not None:
            return _not_called(call, f"{why_not}.")
        assert tool is not None
        assert arguments is not None
        try:
            async with self._connect(call.label, call.name) as connection:
                await connection.ready()
                if self.is_held:
                    raise asyncio.CancelledError  # the next process makes it
                self.is_out = True
                await self._kept.announce(call.item_id, is_synced=not tool.may_repeat)
                return await connection.call(
                    call.item_id,
                    call.name,
                    arguments,
                    limit_s=self._limits.call_s,
                    most_bytes=self._limits.result_bytes,
                )
        except RequestError as error:
            return _not_called(call, error.message)


def _not_called(call: Planned, reason: str) -> Called:
    return Called(item_id=call.item_id, error=protocol_error(f"The tool was not called: {reason}"))


def _arguments_of(call: Planned) -> JsonBody | None:
    """Return the arguments of a call; None if they are no JSON object."""
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except msgspec.DecodeError:
        return None
    return arguments if isinstance(arguments, dict) else None
