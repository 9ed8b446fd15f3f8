"""The images of items: their positions in a text, and which of them a model sees again in the next turn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from tailrace.types import IMAGE_MARK, Image, KeptImage, Message

__all__ = [
    "ID_PREFIX",
    "MAX_BYTES",
    "MAX_IMAGES",
    "PLACEHOLDER",
    "ItemImage",
    "digest_in",
    "image_id",
    "marked",
    "unmarked",
    "with_newest_images",
]

ID_PREFIX = "img_"
_ID = re.compile(rf"{ID_PREFIX}([0-9a-f]{{64}})", re.ASCII)
MAX_BYTES = 128 * 2**20  # of the images of a conversation
MAX_IMAGES = 256  # of a conversation
PLACEHOLDER = "[image omitted]"


class ItemImage(msgspec.Struct, frozen=True, array_like=True):
    """An image in an item."""

    at: int  # how many characters of the item's text are before it
    kept: KeptImage | None = None  # None until it is in the database


def image_id(image: ItemImage) -> str:
    """Return the id by which a request can name an image of its owner."""
    return ID_PREFIX + (image.kept.digest if image.kept is not None else "")


def digest_in(text: str) -> str:
    """Return the digest of an image by its id; "" if the text is none."""
    found = _ID.fullmatch(text)
    return found[1] if found is not None else ""


def marked(text: str, images: Sequence[ItemImage]) -> str:
    """Return a text with marks where its images are."""
    pieces, start = [], 0
    for image in images:
        pieces.append(text[start : image.at])
        start = image.at
    return IMAGE_MARK.join([*pieces, text[start:]])


def unmarked(text: str) -> tuple[str, tuple[ItemImage, ...]]:
    """Return a text without its marks, and images at their positions."""
    if IMAGE_MARK not in text:
        return text, ()
    *before, last = text.split(IMAGE_MARK)
    images, at = [], 0
    for piece in before:
        at += len(piece)
        images.append(ItemImage(at))
    return "".join([*before, last]), tuple(images)


def with_newest_images(
    messages: Iterable[Message], num_before: int, *, num_images: int, num_bytes: int
) -> tuple[Message, ...]:
    """Return messages of which the first `num_before` have only their newest images: at most so many, with so many
    bytes together. Placeholders stand for the others."""
    shown = list(messages)
    for index in reversed(range(num_before)):
        message = shown[index]
        num_left = len(message.images)
        for image in reversed(message.images):
            num_bytes -= _size(image)
            if not num_images or num_bytes < 0:
                num_images = 0
                break
            num_images -= 1
            num_left -= 1
        if num_left:
            content = _with_placeholders(message.content, num_left)
            shown[index] = replace(message, content=content, images=message.images[num_left:])
    return tuple(shown)


def _size(image: Image) -> int:
    return image.kept.num_bytes if image.kept is not None else len(image.content)


def _with_placeholders(content: str, num_images: int) -> str:
    """Return a text with placeholders for its first marks, each on a line of its own."""
    first, *rest = content.split(IMAGE_MARK, num_images)
    pieces = [first]
    for index, piece in enumerate(rest, 1):
        if pieces[-1] and not pieces[-1].endswith("\n"):
            pieces.append("\n")
        is_end = index == len(rest) and not piece
        pieces += [PLACEHOLDER, piece if is_end or piece.startswith("\n") else "\n" + piece]
    return "".join(pieces)
