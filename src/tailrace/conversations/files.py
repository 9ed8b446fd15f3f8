"""The file formats of conversations, and how to detect the format of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tailrace.conversations.chatgpt_file import read_chatgpt, write_chatgpt
from tailrace.conversations.drafts import Draft, Json
from tailrace.conversations.items import Conversation, Item
from tailrace.conversations.own_file import FORMAT, read_own, write_own
from tailrace.conversations.sharegpt_file import read_sharegpt, write_sharegpt
from tailrace.errors import RequestError

__all__ = ["FORMS", "FRAMES", "read_file"]

_MAX_CONVERSATIONS = 1000  # in a file
_VERSION = 1

Write = Callable[[Conversation, Sequence[Item]], Json]

FORMS: dict[str, Write] = {"tailrace": write_own, "chatgpt": write_chatgpt, "sharegpt": write_sharegpt}
# The text before and after the conversations, which are separated by commas.
FRAMES = dict.fromkeys(FORMS, (b"[", b"]")) | {
    "tailrace": (f'{{"format":"{FORMAT}","version":{_VERSION},"conversations":['.encode(), b"]}")
}


def read_file(value: object) -> list[Draft]:
    """Read a file of tailrace, ChatGPT's `conversations.json`, a ShareGPT file, or a single conversation of the latter
    two.

    Raises: RequestError with the place in the file.
    """
    if isinstance(value, dict) and value.get("format") == FORMAT:
        if value.get("version") != _VERSION:
            raise RequestError("This file was written by another version of tailrace.", param="version")
        given, where, read = value.get("conversations"), "conversations", read_own
    else:
        given, where, read = value if isinstance(value, list) else [value], "", _read_foreign
    if not isinstance(given, list):
        raise RequestError("conversations must be a list.", param="conversations")
    if len(given) > _MAX_CONVERSATIONS:
        text = f"A file can have at most {_MAX_CONVERSATIONS} conversations. Split the file."
        raise RequestError(text, param="conversations")
    return [read(one, f"{where}[{place}]") for place, one in enumerate(given)]


def _read_foreign(value: object, where: str) -> Draft:
    if isinstance(value, dict) and "mapping" in value:
        return read_chatgpt(value, where)
    if isinstance(value, dict) and "conversations" in value:
        return read_sharegpt(value, where)
    raise RequestError(
        f"{where}: not a conversation in the format of tailrace, ChatGPT (conversations.json) or ShareGPT.",
        param=where,
    )
