"""Images in the requests of all wires: their bytes, from data URLs or base64 text."""

from __future__ import annotations

import binascii
import re

from tailrace.conversations.item_images import ID_PREFIX, digest_in
from tailrace.errors import RequestError
from tailrace.types import Image, KeptImage

__all__ = ["image_of_base64", "image_of_id", "image_of_url", "len_without_images"]


_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_\\"
_BEGINNING = re.compile(rb"(?:data:[^,]{0,60},)?(?:iVBORw0KGg|\\?[/_]9j\\?[/_]|UklGR|R0lGOD)")  # PNG, JPEG, WebP, GIF
_AS_QUOTES = bytes.maketrans(b"()", b'""')  # around an image in Markdown
_SHORTEST = 4096  # of an image that counts as one
_MAX_OTHERS = 64  # characters in a text of base64: the beginning of a data URL
_MAX_PIECES = 200_000  # of a body: what comes after them counts as text
_DATA_URL = re.compile(r"data:([^,;]{0,100})((?:;[^,;]{0,100})*),", re.IGNORECASE)


def image_of_url(url: str, where: str) -> Image:
    """Return the image in a data URL, which is at `where` in the request; or an image to be fetched; or one that the
    database has, by its id.

    Raises: RequestError for another URL.
    """
    if url.startswith(ID_PREFIX):
        return image_of_id(url, where)
    found = _DATA_URL.match(url)
    if found is None:
        if url[:8].lower().startswith(("http://", "https://")):
            return Image(b"", where, url=url)
        raise RequestError(f"{where} must be a data URL: data:image/png;base64,…", param=where)
    media_type, options = found[1].lower(), found[2].lower()
    if not options.endswith(";base64"):
        raise RequestError(f"{where} must be encoded as base64: data:image/png;base64,…", param=where)
    if media_type.startswith("image/svg"):
        raise RequestError(f"{where}: SVG is not supported. Send PNG, JPEG, WebP or GIF.", param=where)
    return image_of_base64(url[found.end() :], where)


def image_of_id(text: str, where: str) -> Image:
    """Return an image of a conversation by its id. Raises: RequestError if it is none."""
    digest = digest_in(text)
    if not digest:
        raise RequestError(f"{where} is not the id of an image in a conversation.", param=where)
    return Image(b"", where, kept=KeptImage(digest, "", 0))


def image_of_base64(text: str, where: str) -> Image:
    """Return an image from its bytes as base64, also without padding or in the alphabet for URLs.

    Raises: RequestError.
    """
    try:
        try:
            content = binascii.a2b_base64(text, strict_mode=True)  # the usual form: megabytes, read only once
        except ValueError:
            content = binascii.a2b_base64(_usual_form(text), strict_mode=True)
    except ValueError:
        raise RequestError(f"{where} is not valid base64.", param=where) from None
    if not content:
        raise RequestError(f"{where} is empty.", param=where)
    return Image(content, where)


def len_without_images(text: bytes) -> int:
    """Return how many bytes a JSON text has besides its images, at least. What is inside of long texts in base64 that
    begin as an image counts as one: such a text needs no more memory when it is parsed, and has no values."""
    num_bytes = len(text)
    for piece in text.translate(_AS_QUOTES).split(b'"', _MAX_PIECES):
        if len(piece) < _SHORTEST or not _BEGINNING.match(piece):
            continue
        is_plain = piece.isascii() and b"\\u" not in piece
        if is_plain and len(piece.translate(None, _BASE64)) <= _MAX_OTHERS:
            num_bytes -= len(piece)
    return num_bytes


def _usual_form(text: str) -> str:
    text = "".join(text.split()).replace("-", "+").replace("_", "/").replace("%2B", "+").replace("%2F", "/")
    text = text.replace("%3D", "=").rstrip("=")
    return text + "=" * (-len(text) % 4)
