"""How a model of transformers reads images: by the processor beside its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from tailrace.engines import Sight
from tailrace.errors import SequenceFailed
from tailrace_kit.pictures import check_shape, opened

__all__ = ["Eyes", "has_eyes"]

_OF_TEXT = ("input_ids", "attention_mask")
_KINDS_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")  # 1 for the tokens of images


def has_eyes(path: str) -> bool:
    """Return whether the model in a directory has a part that reads images."""
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return getattr(config, "vision_config", None) is not None


class Eyes:
    """The processor of one model. Raises: the library's exceptions if it cannot be loaded."""

    def __init__(self, path: str) -> None:
        # Any: the library's processor, whichever it is
        self._processor: Any = transformers.AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]
            path, local_files_only=True, trust_remote_code=False
        )
        self._placeholder: str = self._processor.image_token

    def see(self, image: bytes) -> Sight:
        """As `Seeing.see`."""
        pixels = opened(image)
        check_shape(pixels, self._processor.image_processor)
        try:
            read = self._processor(images=[pixels], text=[self._placeholder], return_text_replacement_offsets=True)
            expansion: str = read["text_replacement_offsets"][0][0]["replacement"]
        except Exception as error:  # the library raises whatever its processors do
            raise SequenceFailed("its size does not suit the model") from error
        return Sight(self._placeholder, expansion)

    def inputs(self, images: Sequence[bytes], token_ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return what the model gets beside the ids of a prompt with these images. Raises: SequenceFailed."""
        try:
            read = self._processor(
                images=[opened(image) for image in images],
                text=[self._placeholder * len(images)],
                return_tensors="pt",
            )
        except Exception as error:  # as above
            raise SequenceFailed("an image does not suit the model") from error
        given: dict[str, torch.Tensor] = {name: value for name, value in read.items() if name not in _OF_TEXT}
        for name in _KINDS_OF_TOKENS:
            if name in given:
                own = set(self._processor.image_token_ids)
                given[name] = torch.tensor([[int(token_id in own) for token_id in token_ids]])
        return given
