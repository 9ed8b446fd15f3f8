"""Reads the images of requests as the engine takes them, within the memory that there is for images."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator

from tailrace.engines.interface import Capabilities
from tailrace.errors import QueueFull, UnsupportedParameter
from tailrace.generation.eye import Eye
from tailrace.generation.limits import Limits
from tailrace.generation.observers import ImageKeeper
from tailrace.generation.prompts import images_of, with_images
from tailrace.generation.run import Run
from tailrace.images.image_fetch import ImageFetcher
from tailrace.images.owner_turns import OwnerTurns
from tailrace.images.reader import BUSY, ImageReader
from tailrace.types import GenerateRequest, Image

__all__ = ["RequestImages"]

_FOUND_AT_ONCE = 4  # requests whose images are read from where they are kept


class RequestImages:
    """Reads images. `hosts` are those from which they are fetched; `live` are the streams of the model."""

    def __init__(self, hosts: str, eye: Eye, live: Collection[Run]) -> None:
        self._eye = eye
        self._live = live
        self._reader = ImageReader(ImageFetcher(hosts))
        self._finding = OwnerTurns(_FOUND_AT_ONCE, _FOUND_AT_ONCE // 2)
        self._coming_bytes = 0  # of the images of requests that are no streams yet

    async def read(
        self,
        request: GenerateRequest,
        capabilities: Capabilities,
        limits: Limits,
        keeper: ImageKeeper | None,
        held: contextlib.ExitStack,
    ) -> GenerateRequest:
        """Return a request with its images as the engine takes them, and how they are written in the prompt. Their room
        is reserved until `held` is closed.

        Raises: RequestError if an image cannot be used, AdmissionError, EngineLost, StorageError.
        """
        images, owner, within_s = images_of(request), request.owner, limits.queue_s
        for image in images:
            if image.kept is not None and keeper is None:
                raise UnsupportedParameter(f"{image.param}: send the image itself here.", param=image.param)
        images = await self._reader.fetch(images, within_s, owner=owner)
        async with self._finding.turn_or_refusal(owner, within_s, BUSY):  # few are in memory before room is reserved
            images = tuple(await keeper.find_images(owner, images)) if keeper is not None else images
            on_read = held.enter_context(self._room(images, limits.image_bytes))
        is_kept = keeper is not None and keeper.keeps(request)  # only pixels are, which count as in later turns
        as_sent = not capabilities.sees and not is_kept
        read = await self._reader.read(images, as_sent=as_sent, owner=owner, within_s=within_s, on_read=on_read)
        if capabilities.sees:
            seen = [await self._eye.see(image, within_s, owner=owner, caller=request.caller) for image in read]
            read = tuple(seen)
        return with_images(request, read)

    @contextlib.contextmanager
    def _room(self, images: Iterable[Image], most_bytes: int) -> Iterator[Callable[[Image, Image], None]]:
        """Reserve the bytes of the images of a request that is no stream yet. Yields what to call when an image has
        been read, with the image before and after. Raises: QueueFull if they are too many beside those of all streams
        and requests."""
        reserved = 0

        def reserve(num_bytes: int) -> None:
            nonlocal reserved
            held = sum(len(content) for run in self._live for content in run.record.attachments.values())
            if held + self._coming_bytes + num_bytes > most_bytes:
                raise QueueFull("Too many images are in use. Try again later.", retry_after_s=5.0)
            self._coming_bytes += num_bytes
            reserved += num_bytes

        reserve(sum(map(len, {image.content for image in images})))
        try:
            yield lambda before, after: reserve(len(after.content) - len(before.content))
        finally:
            self._coming_bytes -= reserved
