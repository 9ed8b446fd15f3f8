"""What a file format of conversations is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tailrace.conversations.drafts import Draft, Json
from tailrace.conversations.items import Conversation, Item

__all__ = ["ConversationFormat"]


@dataclass(frozen=True, slots=True)
class ConversationFormat:
    """A format of files in JSON, which have one conversation or a list of them."""

    name: str  # of the format in requests
    title: str  # in messages
    fits: Callable[[object], bool]  # whether a parsed value is a conversation in this format
    # Reads such a value; the text is its position in the file, for errors. Raises: RequestError.
    read: Callable[[object, str], Draft]
    write: Callable[[Conversation, Sequence[Item]], Json]
    frame: tuple[bytes, bytes] = (b"[", b"]")  # the text before and after the conversations, which commas separate
    # Of a format with images, the text before and after them: they follow the conversations. None: it has no images.
    images: tuple[bytes, bytes] | None = None
