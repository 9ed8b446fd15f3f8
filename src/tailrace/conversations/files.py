"""The file formats of conversations, tailrace's own and those of plugins, and how to detect the format of a file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from tailrace.conversations.drafts import Draft
from tailrace.conversations.formats import ConversationFormat
from tailrace.conversations.own_file import FORMAT, read_own, write_own
from tailrace.errors import RequestError
from tailrace.packages.plugins import load_plugins

__all__ = ["FORMATS_GROUP", "OWN_FORMAT", "file_formats", "read_file"]

FORMATS_GROUP = "tailrace.conversation_formats"  # of entry points
_MAX_CONVERSATIONS = 1000  # in a file
_VERSION = 1


def _is_own(value: object) -> bool:
    return isinstance(value, dict) and value.get("format") == FORMAT


OWN_FORMAT = ConversationFormat(
    "tailrace",
    "tailrace",
    fits=_is_own,
    read=read_own,
    write=write_own,
    frame=(f'{{"format":"{FORMAT}","version":{_VERSION},"conversations":['.encode(), b"]}"),
)


@cache
def file_formats() -> Mapping[str, ConversationFormat]:
    """Return all formats by name, tailrace's own first."""
    plugins = load_plugins(
        FORMATS_GROUP, ConversationFormat, taken={OWN_FORMAT.name}, refuses=lambda one, others: ""
    ).found
    return {OWN_FORMAT.name: OWN_FORMAT, **plugins}


def read_file(value: object) -> list[Draft]:
    """Read a file of tailrace, or one conversation or a list of them in the formats of plugins.

    Raises: RequestError with the place in the file.
    """
    if isinstance(value, dict) and OWN_FORMAT.fits(value):
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
    formats = list(file_formats().values())
    for one in formats[1:]:
        if one.fits(value):
            return one.read(value, where)
    *titles, last = [one.title for one in formats]
    known = f"{', '.join(titles)} or {last}" if titles else last
    raise RequestError(f"{where}: not a conversation in the format of {known}.", param=where)
