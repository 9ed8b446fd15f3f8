"""A turn: what a request adds to a conversation, which is its input and the answer.

It is kept with the stream, and says all that is needed to write both into the database, also after a crash. Ids are
made of the stream's, so that a turn that is written twice is there once.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from tailrace.conversations.items import ID_PREFIXES, Item, ItemStatus, chained
from tailrace.text.tool_calls import ToolCallReader

__all__ = ["Spoken", "Turn", "read_turn"]


@dataclass(frozen=True, slots=True)
class Spoken:
    """What a stream has come to: the answer's text, and whether there is more to come, or would have been."""

    text: str = ""
    status: ItemStatus = "in_progress"


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`parent_id` is what the input follows. `prefix` is the beginning of the answer, where one goes on that was there
    already. The rest says how calls are read out of the answer's text, and how the wire names them: by their number
    among the calls, or among the items of the answer."""

    conversation_id: str
    parent_id: str | None = None
    said: tuple[Item, ...] = ()  # the input
    prefix: str = ""
    reads_tools: bool = False
    forced_tool: bool = False
    single_call: bool = False
    calls_by_item: bool = False

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    def input(self, stream_id: str, created_s: float) -> list[Item]:
        ids = (f"{ID_PREFIXES[item.kind]}_{stream_id}_in{number}" for number, item in enumerate(self.said))
        return chained(self.said, ids, self.parent_id, created_s)

    def answer(self, stream_id: str, spoken: Spoken, parent_id: str | None, created_s: float) -> list[Item]:
        """The items of the answer, one at least, behind `parent_id`. One that is in progress has its prefix only."""
        items = self._items(stream_id, spoken.text) if spoken.status != "in_progress" else []
        items = [replace(item, stream_id=stream_id) for item in items or [Item(role="assistant", text=self.prefix)]]
        items[-1] = replace(items[-1], status=spoken.status)
        ids = (f"{ID_PREFIXES[item.kind]}_{stream_id}_{number}" for number, item in enumerate(items))
        return chained(items, ids, parent_id, created_s)

    def _items(self, stream_id: str, text: str) -> list[Item]:
        if not self.reads_tools:
            return [Item(role="assistant", text=self.prefix + text)]
        reader = ToolCallReader(forced=self.forced_tool, single=self.single_call)
        items = [Item(role="assistant", text=self.prefix)] if self.prefix else []
        for part in reader.push(text) + reader.flush():
            if isinstance(part, str):
                if not items or items[-1].kind != "message":
                    items.append(Item(role="assistant"))
                items[-1] = replace(items[-1], text=items[-1].text + part)
            elif part.name:
                number = str(len(items)) if self.calls_by_item else f"0_{part.index}"
                items.append(Item(kind="function_call", name=part.name, call_id=f"call_{stream_id}_{number}"))
            else:
                items[-1] = replace(items[-1], text=items[-1].text + part.arguments)
        return items


def read_turn(encoded: bytes) -> Turn:
    return msgspec.json.decode(encoded, type=Turn)
