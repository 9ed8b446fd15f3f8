"""Reads the events of the server's own answers, whose form is known."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from tailrace.dialects import JsonBody

__all__ = ["FINAL", "read_events"]

FINAL = ("response.completed", "response.incomplete", "response.failed")  # the last events of an answer


async def read_events(parts: AsyncIterator[bytes]) -> AsyncIterator[JsonBody]:
    """Yield the data of the events in the pieces of an answer. Comments are left out."""
    rest = b""
    async for part in parts:
        *blocks, rest = (rest + part).split(b"\n\n")
        for block in blocks:
            for line in block.split(b"\n"):
                if line.startswith(b"data: "):
                    yield msgspec.json.decode(line.removeprefix(b"data: "))
