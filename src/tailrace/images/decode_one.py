"""Decodes one image from standard input in a short-lived process, because decoders of images have defects and images
can be made to cost any memory. Run by its path, so that it imports only Pillow.

Standard output is the media type of the input, a line end, and the canonical image: a PNG of the pixels in RGB, turned
as its orientation says, the first frame of an animation, on white where it is transparent. The exit status is the
result.
"""

from __future__ import annotations

import io
import resource
import sys

__all__ = ["DAMAGED", "EXTREME", "FORMATS", "MAX_PIXELS", "MAX_RATIO", "TOO_LARGE", "UNKNOWN", "main"]

UNKNOWN, DAMAGED, TOO_LARGE, EXTREME = 3, 4, 5, 6
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 2**24
MAX_RATIO = 100  # of the longer side to the shorter one; processors of models scale the shorter side up
_CPU_S = 5
_MEMORY_BYTES = 1024 * 2**20  # of address space; the largest image needs about 300 MB
_COMPRESSION = 3  # of 9: a picture of 12 megapixels takes 0.9 s; with 6, the default, 2.4 s, and is no smaller


def main() -> int:
    """Decode the image. Returns 0, or why it cannot be used. If it exceeds the time, a signal kills the process."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    Image.MAX_IMAGE_PIXELS = None  # checked below
    try:
        image = Image.open(io.BytesIO(sys.stdin.buffer.read()), formats=FORMATS)
    except UnidentifiedImageError:
        return UNKNOWN
    except Exception:  # decoders raise whatever they like
        return DAMAGED
    media_type = "image/jpeg" if image.format == "MPO" else f"image/{(image.format or '').lower()}"
    longer, shorter = max(image.size), min(image.size)
    if longer * shorter > MAX_PIXELS:
        return TOO_LARGE
    if longer > MAX_RATIO * max(1, shorter):
        return EXTREME
    try:
        image.load()
        turned = ImageOps.exif_transpose(image)
        if turned.mode.startswith("I;16"):
            turned = turned.point(lambda value: value / 256).convert("L")
        if turned.has_transparency_data:
            white = Image.new("RGBA", turned.size, "white")
            turned = Image.alpha_composite(white, turned.convert("RGBA"))
        canonical = io.BytesIO()
        # A new image, because what a file says beside its pixels goes with the old one.
        pixels = Image.frombytes("RGB", turned.size, turned.convert("RGB").tobytes())
        pixels.save(canonical, "PNG", compress_level=_COMPRESSION)
    except MemoryError:
        return TOO_LARGE
    except Exception:  # as above
        return DAMAGED
    sys.stdout.buffer.write(media_type.encode() + b"\n" + canonical.getbuffer())
    return 0


if __name__ == "__main__":
    sys.exit(main())
