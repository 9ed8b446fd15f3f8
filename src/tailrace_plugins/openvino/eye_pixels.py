"""Turns an image into the squares of pixels that a vision tower gets, and says how many there are.

The steps, their order and their roundings are those of transformers' image processors with Pillow, so the pixels are
equal to theirs.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from tailrace.errors import ModelError, SequenceFailed

__all__ = ["Preparation", "read_preparation", "read_processor"]

Config = Mapping[str, Any]  # Any: JSON
Pixels = npt.NDArray[np.float32]

_LONGEST = 4096  # of an image, as it is resized. Source: MAX_IMAGE_SIZE of Idefics3
_MOST_PIXELS = 2**26  # of an image as it is resized: 256 MiB
_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class Preparation:
    """How a model wants its images. Lengths are numbers of pixels."""

    # square: one square; crop: the shorter side gets a length, and the middle is kept; grid: squares of a large image,
    # row by row, and then the whole image as one square
    kind: Literal["square", "crop", "grid"]
    side: int  # of a square
    length: int  # crop: of the shorter side; grid: of the longer side
    resample: int  # Pillow's number of a filter
    mean: tuple[float, ...] = _HALF  # of each colour, of values from 0 to 1
    deviation: tuple[float, ...] = _HALF
    factor: float = 1 / 255

    def grid(self, image: bytes) -> tuple[int, int]:
        """Return in how many rows and columns an image is cut; (0, 0): in none. Reads only its head. Raises:
        SequenceFailed if the model cannot read an image of this shape."""
        width, height = _opened(image).size
        shorter, longer = sorted((width, height))
        if self.kind == "crop" and self.length**2 * longer > _MOST_PIXELS * shorter:
            raise SequenceFailed("an image is too narrow for this model")
        if self.kind != "grid":
            return 0, 0
        width, height = self._multiples(*self._enlarged(width, height))
        rows, columns = height // self.side, width // self.side
        return (rows, columns) if rows * columns > 1 else (0, 0)

    @property
    def most_squares(self) -> int:
        """The largest number of squares of an image."""
        return math.ceil(self.length / self.side) ** 2 + 1 if self.kind == "grid" else 1

    def squares(self, image: bytes) -> Iterator[Pixels]:
        """Yield the squares of an image, each float32 of (1, 3, side, side)."""
        for square in self._cut(_opened(image).convert("RGB")):
            pixels = np.moveaxis(np.asarray(square), -1, 0) * np.float64(self.factor)
            even = pixels.astype(np.float32) - np.array(self.mean, np.float32)[:, None, None]
            yield (even / np.array(self.deviation, np.float32)[:, None, None])[None]

    def _cut(self, image: Image.Image) -> Iterator[Image.Image]:
        side = self.side
        if self.kind == "square":
            yield self._resized(image, side, side)
        elif self.kind == "crop":
            yield self._middle(image)
        else:
            image = self._resized(image, *self._enlarged(*image.size))
            image = self._resized(image, *self._multiples(*image.size))
            if image.size != (side, side):
                for top in range(0, image.height, side):
                    for left in range(0, image.width, side):
                        yield image.crop((left, top, left + side, top + side))
            yield self._resized(image, side, side)

    def _resized(self, image: Image.Image, width: int, height: int) -> Image.Image:
        return image.resize((width, height), self.resample)

    def _middle(self, image: Image.Image) -> Image.Image:
        shorter, longer = sorted(image.size)
        lengths = self.length, int(self.length * longer / shorter)
        image = self._resized(image, *(lengths if image.width <= image.height else lengths[::-1]))
        left, top = (image.width - self.side) // 2, (image.height - self.side) // 2
        return image.crop((left, top, left + self.side, top + self.side))  # black where it is outside

    def _enlarged(self, width: int, height: int) -> tuple[int, int]:
        """Return the size with the longer side of the wanted length. The shorter one is even."""
        ratio = width / height
        if width >= height:
            width, height = self.length, _even(int(self.length / ratio))
        else:
            width, height = _even(int(self.length * ratio)), self.length
        return _at_most(max(width, 1), max(height, 1))

    def _multiples(self, width: int, height: int) -> tuple[int, int]:
        """Return the size in whole squares."""
        ratio = width / height
        if width >= height:
            width = _up(width, self.side)
            return width, _up(int(width / ratio), self.side)
        height = _up(height, self.side)
        return _up(int(height * ratio), self.side), height


def _opened(image: bytes) -> Image.Image:
    return Image.open(io.BytesIO(image), formats=("PNG",))


def _even(length: int) -> int:
    return length + length % 2


def _up(length: int, side: int) -> int:
    return math.ceil(length / side) * side


def _at_most(width: int, height: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > _LONGEST:
        width, height = _LONGEST, int(_LONGEST / ratio)
    elif height > width and height > _LONGEST:
        width, height = int(_LONGEST * ratio), _LONGEST
    return max(width, 1), max(height, 1)


def read_processor(path: Path) -> Config:
    """Return the configuration of the image processor in a directory, which newer versions keep in another file.
    Raises: OSError; ValueError."""
    both = path / "processor_config.json"
    config: Config = json.loads(both.read_text()) if both.is_file() else {}
    if isinstance(own := config.get("image_processor"), dict):
        return own
    old: Config = json.loads((path / "preprocessor_config.json").read_text())
    return old


def read_preparation(config: Config, side: int) -> Preparation:
    """Read the configuration of an image processor: `preprocessor_config.json`, or `image_processor` in
    `processor_config.json`. `side` is that of the vision tower. Raises: ModelError for what is not known here."""
    kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    name = kind.removesuffix("Fast").removesuffix("Pil").removesuffix("ImageProcessor")
    if name not in _READERS:
        raise ModelError(f"OpenVINO does not prepare images as {kind or 'an unnamed processor'}.")
    if not all(config.get(key, True) for key in ("do_resize", "do_rescale", "do_normalize")):
        raise ModelError(f"OpenVINO does not prepare images with a step of {kind} left out.")
    try:
        filter_, mean, deviation, reader = _READERS[name]
        found = reader(config, side, int(config.get("resample", filter_)))
        if not 1 <= side <= _LONGEST or not 1 <= found.length <= _LONGEST:
            raise ModelError(f"The image processor makes images with a side that is not from 1 to {_LONGEST} pixels.")
        return replace(
            found,
            mean=tuple(map(float, config.get("image_mean") or mean)),
            deviation=tuple(map(float, config.get("image_std") or deviation)),
            factor=float(config.get("rescale_factor") or 1 / 255),
        )
    except (ArithmeticError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"The configuration of the image processor is incomplete: {error}.") from error


def _square(config: Config, side: int, resample: int) -> Preparation:
    if config.get("do_pan_and_scan"):
        raise ModelError("OpenVINO does not cut images as do_pan_and_scan says.")
    size = config.get("size") or {"height": side, "width": side}
    if {size.get("height"), size.get("width")} != {side}:
        raise ModelError(f"The image processor makes squares of another size than {side}, which the tower needs.")
    return Preparation("square", side, side, resample)


def _crop(config: Config, side: int, resample: int) -> Preparation:
    # Either is a dictionary or, in old files, a number. Any: JSON
    size: Any = config.get("size", side)
    crop: Any = config.get("crop_size", side)
    if isinstance(size, dict) and "height" in size:
        return _square(config, side, resample)
    length = int(size["shortest_edge"] if isinstance(size, dict) else size)
    cropped = set(crop.values()) if isinstance(crop, dict) else {crop}
    if cropped != {side} or not config.get("do_center_crop", True):
        raise ModelError(f"The image processor makes squares of another size than {side}, which the tower needs.")
    return Preparation("crop", side, length, resample)


def _grid(config: Config, side: int, resample: int) -> Preparation:
    most = (config.get("max_image_size") or {}).get("longest_edge", 364)
    if int(most) != side:
        raise ModelError(f"The image processor makes squares of {most} pixels, and the tower needs {side}.")
    if not config.get("do_image_splitting", True):
        raise ModelError("OpenVINO does not prepare images with do_image_splitting switched off.")
    length = int((config.get("size") or {}).get("longest_edge", 4 * 364))
    return Preparation("grid", side, length, resample)


_CLIP_MEAN, _CLIP_DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# By the first part of a processor's name: the defaults of its class in transformers, and what reads its values.
_READERS = {
    "CLIP": (3, _CLIP_MEAN, _CLIP_DEVIATION, _crop),
    "Gemma3": (2, _HALF, _HALF, _square),
    "Idefics3": (1, _HALF, _HALF, _grid),
    "Siglip": (3, _HALF, _HALF, _square),
    "SmolVLM": (1, _HALF, _HALF, _grid),
}
