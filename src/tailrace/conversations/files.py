"""Files of conversations: which forms there are, and which one a file has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tailrace.conversations.chatgpt_file import read_chatgpt, write_chatgpt
from tailrace.conversations.drafts import Draft, Json
from tailrace.conversations.items import Conversation, Item
from tailrace.conversations.own_file import FORMAT, read_own, write_own
from tailrace.conversations.sharegpt_file import read_sharegpt, write_sharegpt
from tailrace.errors import RequestError

__all__ = ["FORMS", "FRAMES", "read_file"]

_MOST = 1000  # conversations in a file
_VERSION = 1

Write = Callable[[Conversation, Sequence[Item]], Json]

FORMS: dict[str, Write] = {"tailrace": write_own, "chatgpt": write_chatgpt, "sharegpt": write_sharegpt}
# What stands before and behind the conversations, which have commas between them.
FRAMES = dict.fromkeys(FORMS, (b"[", b"]")) | {
    "tailrace": (f'{{"format":"{FORMAT}","version":{_VERSION},"conversations":['.encode(), b"]}")
}


def read_file(value: object) -> list[Draft]:
    """What a file holds: ours, ChatGPT's `conversations.json`, ShareGPT's, or one conversation of theirs.

    Raises: RequestError that says where something is wrong.
    """
    if isinstance(value, dict) and value.get("format") == FORMAT:
        if value.get("version") != _VERSION:
            raise RequestError("This file is of another version of tailrace.", param="version")
        given, where, read = value.get("conversations"), "conversations", read_own
    else:
        given, where, read = value if isinstance(value, list) else [value], "", _read_foreign
    if not isinstance(given, list):
        raise RequestError("conversations is not a list.", param="conversations")
    if len(given) > _MOST:
        raise RequestError(f"A file has at most {_MOST} conversations. Split it.", param="conversations")
    return [read(one, f"{where}[{place}]") for place, one in enumerate(given)]


def _read_foreign(value: object, where: str) -> Draft:
    if isinstance(value, dict) and "mapping" in value:
        return read_chatgpt(value, where)
    if isinstance(value, dict) and "conversations" in value:
        return read_sharegpt(value, where)
    raise RequestError(
        f"{where}: this is no conversation of tailrace's, of ChatGPT's conversations.json, or of ShareGPT's form.",
        param=where,
    )
