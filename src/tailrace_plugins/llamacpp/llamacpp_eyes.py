"""How llama.cpp reads images: by the projector beside the model, as parts of a prompt of text.

Its server takes no token ids beside images. So the texts around the images are written from their ids, and run only if
llama.cpp makes the same ids of them. It does not for a text that reads as a control token, or as other tokens.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from tailrace.engines import Sequence, Sight
from tailrace.errors import ModelError, SequenceFailed
from tailrace.models import ModelCard
from tailrace.models.gguf_header import read_metadata
from tailrace.types import Attachment
from tailrace_plugins.llamacpp.socket_requests import ask

__all__ = ["CONTENT_TEMPLATE", "ImageMarks", "Projector", "marks_of", "sees"]

CONTENT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"  # by which images are counted


class ImageMarks(NamedTuple):
    """How an image is written in a prompt, besides the marks that llama.cpp adds itself."""

    token: str  # in the chat template
    around: str = ""  # what the model's own processor writes before and behind each image
    is_whole: bool = False  # its tokens see each other, so llama.cpp needs them in one step


_MARKS: Mapping[str, ImageMarks] = MappingProxyType(  # by the type of the projector
    {"idefics3": ImageMarks("<image>"), "gemma3": ImageMarks("<start_of_image>", "\n\n", is_whole=True)}
)
_SIZES = ("attention.head_count", "block_count", "embedding_length", "image_size", "patch_size")


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    content: str


class _Count(msgspec.Struct):
    input_tokens: int = 0


class _Props(msgspec.Struct):
    media_marker: str


def marks_of(projector: Path | None) -> ImageMarks | None:
    """Return how images are written for a projector; None if it is of another type, or damaged."""
    if projector is None:
        return None
    try:
        metadata = read_metadata(projector)
    except ModelError:
        return None
    sizes = {name: metadata.get(f"clip.vision.{name}", int) or 0 for name in _SIZES}
    if min(sizes.values()) < 1 or sizes["embedding_length"] % sizes["attention.head_count"]:
        return None  # llama.cpp would end the process
    return _MARKS.get(metadata.get("clip.projector_type", str) or "")


def sees(card: ModelCard) -> bool:
    """Return whether llama.cpp reads images with a model."""
    return marks_of(card.projector) is not None


class Projector:
    """Asks a server whose chat template is `CONTENT_TEMPLATE`. Raises: ModelError if the server has stopped."""

    def __init__(self, socket_path: str, marks: ImageMarks) -> None:
        self._socket_path = socket_path
        self._marks = marks
        self._marker = msgspec.json.decode(ask(socket_path, "GET /props"), type=_Props).media_marker
        self._bos = self._ids("", add_special=True)
        self._num_added = self._count({"type": "text", "text": "x"}) - len(self._ids("x"))

    def see(self, image: bytes) -> Sight:
        """As `Seeing.see`."""
        url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        num_tokens = self._count({"type": "image_url", "image_url": {"url": url}}) - self._num_added
        if num_tokens < 1:
            raise SequenceFailed("its size does not suit the model")
        token, around = self._marks.token, self._marks.around
        return Sight(token, f"{around}{token * num_tokens}{around}")

    def prompt(self, sequence: Sequence) -> dict[str, object]:
        """Return a prompt with images as llama.cpp takes it. Raises: SequenceFailed if it would read other tokens."""
        num_bos = len(self._bos)  # llama.cpp adds them
        if list(sequence.prompt_ids[:num_bos]) != self._bos:
            raise SequenceFailed("a prompt with images has to begin as the model's tokenizer begins one")
        written = ""
        for segment in sequence.segments:
            if isinstance(segment, Attachment):
                written += self._marker
            else:
                assert isinstance(segment, tuple)  # `Sequence.prompt_ids` has checked this
                written += self._text(list(segment[num_bos:]))
                num_bos = max(0, num_bos - len(segment))
        images = [base64.b64encode(image).decode() for image in sequence.images]
        return {"prompt_string": written, "multimodal_data": images}

    def _text(self, ids: list[int]) -> str:
        content = msgspec.json.decode(ask(self._socket_path, "POST /detokenize", {"tokens": ids}), type=_Text).content
        if self._ids(content) != ids:
            raise SequenceFailed("beside an image, llama.cpp would read a text of this prompt as other tokens")
        return content

    def _ids(self, text: str, *, add_special: bool = False) -> list[int]:
        asked = {"content": text, "add_special": add_special, "parse_special": True}
        return msgspec.json.decode(ask(self._socket_path, "POST /tokenize", asked), type=_Tokens).tokens

    def _count(self, part: dict[str, object]) -> int:
        """Return the number of tokens of a message with one part; 0 if llama.cpp refuses it."""
        asked = {"messages": [{"role": "user", "content": [part]}]}
        reply = ask(self._socket_path, "POST /v1/chat/completions/input_tokens", asked)
        return msgspec.json.decode(reply, type=_Count).input_tokens
