"""The turns of the model of one response: those that are kept, and the one that runs, here or at another server.

All servers show the same events of a turn, since its stream numbers them. So one that has shown the first events, as
another server ran it, shows the rest from what is kept, or runs it on.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

import msgspec

from tailrace.dialects import JsonBody
from tailrace_plugins.tool_loop.kept import KeptLoop
from tailrace_plugins.tool_loop.loop_output import ModelTurn, Output
from tailrace_plugins.tool_loop.loop_rows import TurnEnded
from tailrace_plugins.tool_loop.model_requests import LoopModel

__all__ = ["Turns"]

_AT_ONCE = 200  # events that are read again


class Turns:
    """Shows turns in `output`. `on_event` is called when it has grown. A turn is given with its number and its request
    to the model."""

    def __init__(self, kept: KeptLoop, model: LoopModel, output: Output, on_event: Callable[[], None]) -> None:
        self._kept = kept
        self._model = model
        self._output = output
        self._on_event = on_event
        self._raw: list[JsonBody] = []  # events of the turn that runs

    async def show(self, turn: ModelTurn, number: int) -> None:
        """Show what is not shown yet of a turn that is kept."""
        num_seen, self._raw = self._num_seen, []
        self._open()
        for count, event in enumerate(msgspec.json.decode(zlib.decompress(self._kept.turns[number].events)), 1):
            if event["sequence_number"] >= num_seen:
                self._output.feed(turn, event)
            if not count % _AT_ONCE:
                await asyncio.sleep(0)  # others wait

    async def run(self, turn: ModelTurn, number: int, body: JsonBody) -> None:
        """Let the model answer. If it was refused, the turn has no final event."""
        async for event in self._model.events(number, body, self._num_seen):
            self._add(turn, event)

    async def follow(self, turn: ModelTurn, number: int, body: JsonBody) -> None:
        """Show a turn as it comes that runs at another server. Never returns."""
        while True:
            async for event in self._model.found(number, body, self._num_seen):
                self._add(turn, event)
            await self._kept.looked()

    async def stop(self, turn: ModelTurn, number: int, body: JsonBody) -> None:
        """End the stream of a turn, wherever it runs, and show all that it has said: other servers may show it, too."""
        async for event in self._model.found(number, body, self._num_seen, stops=True):
            self._add(turn, event)

    def packed(self) -> list[TurnEnded]:
        """Return the turn that ran, to be kept; nothing if there is no event of it."""
        events, self._raw = self._raw, []
        return [TurnEnded(zlib.compress(msgspec.json.encode(events)))] if events else []

    @property
    def _num_seen(self) -> int:
        return self._raw[-1]["sequence_number"] + 1 if self._raw else 0

    def _open(self) -> None:
        if not self._output.events:
            self._output.open()
            self._on_event()

    def _add(self, turn: ModelTurn, event: JsonBody) -> None:
        self._raw.append(event)
        self._open()
        self._output.feed(turn, event)
        self._on_event()
