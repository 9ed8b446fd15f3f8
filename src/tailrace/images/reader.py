"""Reads the images of requests: each is decoded in a process of its own (`decode_one`), within limits."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tailrace.errors import EngineLost, RequestError
from tailrace.images import decode_one
from tailrace.images.image_fetch import ImageFetcher
from tailrace.images.owner_turns import OwnerTurns
from tailrace.types import Image

__all__ = ["BUSY", "CANONICAL_TYPE", "MAX_BYTES", "MAX_IMAGES", "ImageReader", "check_count"]

CANONICAL_TYPE = "image/png"
MAX_IMAGES = 16  # of a request
MAX_BYTES = 32 * 2**20  # of the canonical images of a request
_AT_ONCE = 2
BUSY = "Too many images are waiting to be read."
_MAX_KNOWN = 1024
_FETCHED_AT_ONCE = 8
_TIMEOUT_S = 60.0  # much longer than the limit of CPU time: reached only on an overloaded machine
_REASONS = {
    decode_one.UNKNOWN: f"it is none of {', '.join(decode_one.FORMATS)}",
    decode_one.DAMAGED: "it is damaged or incomplete",
    decode_one.TOO_LARGE: f"it has more than {decode_one.MAX_PIXELS:,} pixels, or needs too much memory",
    decode_one.EXTREME: f"one side is more than {decode_one.MAX_RATIO} times as long as the other",
}
_TOO_SLOW = "it takes too much time"


class ImageReader:
    """Brings images into their canonical form. For one event loop, which it never blocks.

    Few are read at once, and owners take turns: one owner's many images keep another owner's image waiting for one of
    them. Those of addresses are fetched before, so a slow host keeps only other fetches waiting.
    """

    def __init__(self, fetcher: ImageFetcher | None = None) -> None:
        self._fetcher = fetcher or ImageFetcher("")
        self._known: OrderedDict[str, tuple[str, bool]] = OrderedDict()  # by digest, the last used one last
        self._turns = OwnerTurns(_AT_ONCE)
        self._fetches = OwnerTurns(_FETCHED_AT_ONCE, _FETCHED_AT_ONCE // 2)

    async def fetch(self, images: tuple[Image, ...], within_s: float, *, owner: str = "") -> tuple[Image, ...]:
        """Return the images with the bytes at their addresses. Waits at most `within_s` seconds for the owner's turn.

        Raises: RequestError if there are too many or one cannot be fetched, QueueFull.
        """
        check_count(len(images))
        if not any(image.url for image in images):
            return images
        async with self._fetches.turn_or_refusal(owner, within_s, BUSY):
            return await self._fetcher.fetch(images)

    async def read(
        self,
        images: Sequence[Image],
        *,
        as_sent: bool,
        owner: str = "",
        within_s: float = _TIMEOUT_S,
        most_bytes: int = MAX_BYTES,
        on_read: Callable[[Image, Image], object] = lambda before, after: None,
    ) -> tuple[Image, ...]:
        """Check images, and return them in their canonical form; `as_sent`: in the form in which they came. Each waits
        at most `within_s` seconds for its turn. `on_read` gets each different image, as it came and as it was read.

        Raises: RequestError if one of them cannot be used, QueueFull, EngineLost if it cannot be checked; whatever
        `on_read` raises.
        """
        known: dict[bytes, Image] = {}
        num_bytes = 0
        for image in images:
            if image.content not in known:
                async with self._turns.turn_or_refusal(owner, within_s, BUSY):
                    read = await self._checked(image, as_sent=as_sent)
                    on_read(image, read)
                known[image.content] = read
                num_bytes += len(read.content)
                if num_bytes > most_bytes:
                    raise RequestError(
                        f"The images of a request have at most {most_bytes // 2**20} MiB as PNG. Send smaller ones.",
                        param=image.param,
                    )
        return tuple(replace(known[image.content], param=image.param) for image in images)

    async def _checked(self, image: Image, *, as_sent: bool) -> Image:
        """As `read`, for one image. What has left this reader is not decoded again: each turn of a conversation has
        it."""
        media_type, is_canonical = self._known.get(image.digest, ("", False))
        if media_type and (as_sent or is_canonical):
            self._known.move_to_end(image.digest)
            return replace(image, media_type=media_type)
        read = await self._read(image)
        kept = replace(image, media_type=read.media_type) if as_sent else replace(read, media_type=CANONICAL_TYPE)
        self._known[kept.digest] = (kept.media_type, not as_sent)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return kept

    async def _read(self, image: Image) -> Image:
        status, output = await asyncio.to_thread(_decode, image.content)
        if status:
            reason = _TOO_SLOW if status < 0 else _REASONS[status]
            raise RequestError(f"{image.param}: this image cannot be used: {reason}.", param=image.param)
        media_type, _, content = output.partition(b"\n")
        return replace(image, content=content, media_type=media_type.decode())


def check_count(num_images: int) -> None:
    """Raises: RequestError for more images than a request may have."""
    if num_images > MAX_IMAGES:
        raise RequestError(f"A request has at most {MAX_IMAGES} images.", param="messages")


def _decode(content: bytes) -> tuple[int, bytes]:
    """Return the exit status of the process (negative: killed by its limits), and what it wrote. Blocks. Raises:
    EngineLost if the check itself fails."""
    command = [sys.executable, "-I", str(Path(decode_one.__file__))]
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (subprocess.TimeoutExpired, OSError):
        raise _check_failed() from None
    if done.returncode > 0 and done.returncode not in _REASONS:
        raise _check_failed()
    return done.returncode, done.stdout


def _check_failed() -> EngineLost:
    return EngineLost("Images cannot be read at the moment.")
