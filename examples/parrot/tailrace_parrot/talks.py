from collections.abc import Sequence

import msgspec

from tailrace.conversations import Conversation, ConversationFormat, Draft, Item, Json, as_shape, chained, draft_of


class Talk(msgspec.Struct):
    parrot: list[str]  # first the user's words, then the parrot's, and so on


def fits(value: object) -> bool:
    return isinstance(value, dict) and "parrot" in value


def read(value: object, where: str) -> Draft:
    said = as_shape(value, Talk, where).parrot
    items = [Item(role="assistant" if place % 2 else "user", text=text) for place, text in enumerate(said)]
    placed = chained(items, map(str, range(len(items))), None, 0.0)
    head = placed[-1].item_id if placed else None
    return draft_of(placed, head, title="Parrot", created_s=None, updated_s=None)


def write(conversation: Conversation, items: Sequence[Item]) -> Json:
    return {"parrot": [item.text for item in items if item.kind == "message"]}


FORMAT = ConversationFormat("parrot", "parrots", fits=fits, read=read, write=write)
