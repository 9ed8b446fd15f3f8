"""A turn: what a request adds to a conversation, its input and the answer.

A turn is stored with its stream. It has all that is needed to write both into the database, also after a crash. The ids
of its items are derived from the stream's id, so writing a turn twice has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from tailrace.conversations.items import ID_PREFIXES, Item, ItemStatus, chained
from tailrace.text.calls import ToolCallReader
from tailrace.types import CallReading, KeptImage

__all__ = ["Spoken", "Turn", "read_turn"]


@dataclass(frozen=True, slots=True)
class Spoken:
    """The answer of a stream so far: its text, whether it is complete, and the reasoning before it."""

    text: str = ""
    status: ItemStatus = "in_progress"
    reasoning: str = ""


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request adds to a conversation. The input follows the item `parent_id`. `prefix` is the existing text of
    an answer that the request continues, and `reasoning_prefix` its reasoning. The other fields say how tool calls are
    read from the answer's text, and how the wire numbers them: among the calls, or among all items of the answer."""

    conversation_id: str
    parent_id: str | None = None
    input_items: tuple[Item, ...] = msgspec.field(default=(), name="said")  # the name in stored turns
    prefix: str = ""
    reasoning_prefix: str = ""
    calls: CallReading | None = None
    calls_by_item: bool = False

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @property
    def num_images(self) -> int:
        return sum(len(item.images) for item in self.input_items)

    def input(self, stream_id: str, created_s: float, images: Sequence[KeptImage] = ()) -> list[Item]:
        """Return the items of the input. `images` has those of the whole prompt; the last ones are the input's."""
        rest = iter(images[len(images) - self.num_images :])
        items = [
            replace(item, images=tuple(replace(image, kept=next(rest)) for image in item.images))
            for item in self.input_items
        ]
        ids = (f"{ID_PREFIXES[item.kind]}_{stream_id}_in{number}" for number, item in enumerate(items))
        return chained(items, ids, self.parent_id, created_s)

    def answer(self, stream_id: str, spoken: Spoken, parent_id: str | None, created_s: float) -> list[Item]:
        """Return the items of the answer after `parent_id`, at least one. An answer in progress has only its prefix."""
        items = self._items(stream_id, spoken.text) if spoken.status != "in_progress" else []
        items = [replace(item, stream_id=stream_id) for item in items or [Item(role="assistant", text=self.prefix)]]
        items[0] = replace(items[0], reasoning=self.reasoning_prefix + spoken.reasoning)
        items[-1] = replace(items[-1], status=spoken.status)
        ids = (f"{ID_PREFIXES[item.kind]}_{stream_id}_{number}" for number, item in enumerate(items))
        return chained(items, ids, parent_id, created_s)

    def _items(self, stream_id: str, text: str) -> list[Item]:
        if self.calls is None:
            return [Item(role="assistant", text=self.prefix + text)]
        reader = ToolCallReader(self.calls)
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


class _OldTurn(Turn, frozen=True, kw_only=True):
    """A turn as it was stored before there was more than one format of calls."""

    reads_tools: bool = False
    forced_tool: bool = False
    single_call: bool = False


def read_turn(encoded: bytes) -> Turn:
    old = msgspec.json.decode(encoded, type=_OldTurn)
    if old.reads_tools:
        return replace(old, calls=CallReading(forced=old.forced_tool, single=old.single_call))
    return msgspec.json.decode(encoded, type=Turn)
