"""Images for the processors of Hugging Face's transformers, whichever engine asks them."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

from tailrace.errors import SequenceFailed

__all__ = ["check_shape", "opened"]

_MAX_PIXELS = 2**26  # of an image as a processor makes it, before it cuts it


def opened(image: bytes) -> Image.Image:
    """Return the pixels of a PNG."""
    return Image.open(io.BytesIO(image), formats=("PNG",)).convert("RGB")


def check_shape(image: Image.Image, processor: Any) -> None:  # Any: the library's image processor, whichever it is
    """Raises: SequenceFailed if a narrow image would become too large before the processor cuts it: its shorter side
    may get a fixed length, or it may be put on a square."""
    shorter, longer = sorted(image.size)
    size = getattr(processor, "size", None) or {}
    length, most = size.get("shortest_edge"), size.get("longest_edge")
    num_pixels = length**2 * longer // shorter if length and not most else 0
    if hasattr(processor, "pad_to_square") and getattr(processor, "do_pad", True):
        num_pixels = max(num_pixels, longer**2)
    if num_pixels > _MAX_PIXELS:
        raise SequenceFailed("an image is too narrow for this model")
