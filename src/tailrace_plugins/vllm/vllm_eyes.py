"""How a model of vLLM reads images: by the library's own processor.

The library writes the tokens of an image into a prompt itself, in place of one token. Here the prompt has them already:
they were counted before the request was admitted. So the processor gets each image with that one token, and what it
returns is put where the image stands. A prompt keeps its ids, whatever they are.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems, NestedTensors, PlaceholderRange
from vllm.renderers import BaseRenderer

from tailrace.engines import Sequence, Sight
from tailrace.errors import SequenceFailed
from tailrace.types import Attachment
from tailrace_kit.pictures import check_shape, opened

__all__ = ["VllmEyes"]

_KEPT_BYTES = 64 * 2**20  # of images as the model gets them


class _Read(NamedTuple):
    """An image as the processor has read it."""

    ids: list[int]  # that stand for it
    has_rows: torch.Tensor  # which of these get rows of the vision tower
    item: MultiModalKwargsItem  # what the tower gets

    @property
    def num_bytes(self) -> int:
        return sum(map(_num_bytes, self.item.get_data().values()))

    def range_in(self, ids: tuple[int, ...], start: int) -> PlaceholderRange:
        """Return where this image is in a prompt that has its ids from `start`, perhaps without text at both ends.
        Raises: SequenceFailed if they are not its ids."""
        rows = self.has_rows.nonzero().flatten().tolist()
        for first in range(max(0, rows[-1] + 1 - len(ids)), rows[0] + 1):
            if tuple(self.ids[first : first + len(ids)]) == ids:
                return PlaceholderRange(start, len(ids), self.has_rows[first : first + len(ids)])
        raise SequenceFailed("an image has other tokens than those that vLLM makes of it")


def _num_bytes(nested: NestedTensors | None) -> int:
    if isinstance(nested, torch.Tensor):
        return nested.nbytes
    return sum(map(_num_bytes, nested)) if isinstance(nested, list | tuple) else 0


class VllmEyes:
    """Asks the processor of one model."""

    def __init__(self, renderer: BaseRenderer) -> None:
        """Raises: the library's exceptions, and AttributeError if no control token stands for an image."""
        self._renderer = renderer
        # Any: the library's processor, whichever it is
        processor: Any = renderer.get_mm_processor().info.get_hf_processor()
        self._tokenizer = processor.tokenizer
        self._image_processor = processor.image_processor
        self._placeholder: str = processor.image_token
        self._kept: OrderedDict[str, _Read] = OrderedDict()  # by digest, the last used one last

    def see(self, image: bytes) -> Sight:
        """As `Seeing.see`."""
        read = self._read(Attachment.of(image, "image/png", 0).digest, image)
        return Sight(self._placeholder, self._tokenizer.decode(read.ids, skip_special_tokens=False))

    def prompt(self, sequence: Sequence) -> MultiModalInput:
        """Return a prompt with images as vLLM takes it. Raises: SequenceFailed."""
        digests, items, ranges, start = [], [], [], 0
        for segment in sequence.segments:
            ids = segment.token_ids if isinstance(segment, Attachment) else segment
            assert isinstance(ids, tuple)  # `Sequence.prompt_ids` has checked this
            if isinstance(segment, Attachment):
                read = self._read(segment.digest, sequence.attachments[segment.digest])
                digests.append(segment.digest)
                items.append(read.item)
                ranges.append(read.range_in(ids, start))
            start += len(ids)
        return mm_input(
            list(sequence.prompt_ids), MultiModalKwargsItems({"image": items}), {"image": digests}, {"image": ranges}
        )

    def _read(self, digest: str, image: bytes) -> _Read:
        if (found := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
            return found
        pixels = opened(image)
        check_shape(pixels, self._image_processor)
        asked = {
            "prompt_token_ids": [self._tokenizer.convert_tokens_to_ids(self._placeholder)],
            "multi_modal_data": {"image": [pixels]},
            "multi_modal_uuids": {"image": [digest]},
        }
        try:
            (given,) = self._renderer.render_cmpl([asked])
            (item,), (range_,) = given["mm_kwargs"]["image"], given["mm_placeholders"]["image"]
        except Exception as error:  # the library raises whatever its processors do
            raise SequenceFailed("its size does not suit the model") from error
        has_rows = torch.zeros(len(given["prompt_token_ids"]), dtype=torch.bool)
        end = range_.offset + range_.length
        has_rows[range_.offset : end] = True if range_.is_embed is None else range_.is_embed
        self._kept[digest] = read = _Read(given["prompt_token_ids"], has_rows, item)
        num_bytes = sum(one.num_bytes for one in self._kept.values())
        while num_bytes > _KEPT_BYTES:
            num_bytes -= self._kept.popitem(last=False)[1].num_bytes
        return read
