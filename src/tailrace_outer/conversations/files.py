"""The file formats of conversations, tailrace's own and those of plugins, and how to detect the format of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import msgspec
from msgspec.structs import replace

from tailrace.conversations.drafts import Draft, as_shape
from tailrace.conversations.formats import ConversationFormat
from tailrace.conversations.items import Item
from tailrace.errors import RequestError
from tailrace.packages.plugins import load_plugins
from tailrace.types import KeptImage
from tailrace_outer.conversations.own_file import FORMAT, read_own, write_own

__all__ = ["FORMATS_GROUP", "MAX_FILE_IMAGES", "OWN_FORMAT", "file_formats", "read_file", "read_images", "with_images"]

FORMATS_GROUP = "tailrace.conversation_formats"  # of entry points
_MAX_CONVERSATIONS = 1000  # in a file
MAX_FILE_IMAGES = 256
_VERSION = 1


class _FileImage(msgspec.Struct):
    id: str
    content: bytes  # in JSON as base64


def _is_own(value: object) -> bool:
    return isinstance(value, dict) and value.get("format") == FORMAT


OWN_FORMAT = ConversationFormat(
    "tailrace",
    "tailrace",
    fits=_is_own,
    read=read_own,
    write=write_own,
    frame=(f'{{"format":"{FORMAT}","version":{_VERSION},"conversations":['.encode(), b"]}"),
    images=(b'],"images":[', b"]}"),
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

    Raises: RequestError with the position in the file.
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
    return [read(one, f"{where}[{index}]") for index, one in enumerate(given)]


def read_images(value: object) -> dict[str, bytes]:
    """Return the images of a file by their ids in it. Raises: RequestError with the position in the file."""
    if not (isinstance(value, dict) and OWN_FORMAT.fits(value)):
        return {}
    given = as_shape(value.get("images", []), list[_FileImage], "images")
    if len(given) > MAX_FILE_IMAGES:
        raise RequestError(f"A file can have at most {MAX_FILE_IMAGES} images. Split the file.", param="images")
    return {one.id: one.content for one in given}


def with_images(items: Sequence[Item], images: Mapping[str, KeptImage]) -> list[Item]:
    """Return the items of a file with its images, given by their ids in it. Raises: RequestError if one is missing."""
    try:
        return [
            replace(item, images=tuple(replace(one, kept=images[one.kept.digest]) for one in item.images if one.kept))
            for item in items
        ]
    except KeyError:
        raise RequestError("images: an image of an item is missing in the file.", param="images") from None


def _read_foreign(value: object, where: str) -> Draft:
    formats = list(file_formats().values())
    for one in formats[1:]:
        if one.fits(value):
            return one.read(value, where)
    *titles, last = [one.title for one in formats]
    known = f"{', '.join(titles)} or {last}" if titles else last
    raise RequestError(f"{where}: not a conversation in the format of {known}.", param=where)
