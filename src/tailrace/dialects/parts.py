"""Parts of messages. What the model does not read becomes a short placeholder, and is named: audio, files, and images
without a model that reads them.

What the user asks about now must be complete: a part of it that the model does not read is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tailrace.dialects.bodies import printable
from tailrace.dialects.facts import ServerFacts
from tailrace.dialects.images import image_of_url
from tailrace.dialects.shapes import Other, note
from tailrace.errors import UnsupportedParameter
from tailrace.types import IMAGE_MARK, Image

__all__ = ["ImagePart", "ImageUrlPart", "RefusalPart", "TextPart", "eyes_of", "first_asked", "omit", "text_of"]

# What a part shows to people, by its kind on any wire.
_MEDIA = {
    "audio": "audio",
    "computer_screenshot": "image",
    "document": "file",
    "file": "file",
    "image": "image",
    "image_url": "image",
    "input_audio": "audio",
    "input_file": "file",
    "input_image": "image",
    "input_video": "video",
    "video": "video",
    "video_url": "video",
}


class TextPart(msgspec.Struct, tag="text"):
    text: str


class ImageUrl(msgspec.Struct):
    url: str


class ImagePart(msgspec.Struct):
    """An image, in the form of some wire."""

    def image(self, where: str) -> Image:
        """Return the image of this part, which is at `where` in the request. Raises: RequestError."""
        raise NotImplementedError


class ImageUrlPart(ImagePart, tag="image_url"):
    image_url: ImageUrl | str

    def image(self, where: str) -> Image:
        url = self.image_url if isinstance(self.image_url, str) else self.image_url.url
        return image_of_url(url, f"{where}.image_url")


class RefusalPart(msgspec.Struct, tag="refusal"):
    refusal: str


def eyes_of(server: ServerFacts) -> list[Image] | None:
    """Return a list for the images of a request; None if the model reads none."""
    return [] if server.generator.sees else None


def first_asked(roles: Sequence[str]) -> int:
    """Return the index of the first message of what the user asks now: what comes after the last answer. After results
    of tools the user asks nothing new, and the index is behind the last message. A beginning of the answer, at the end,
    does not count."""
    end = len(roles) - 1 if roles and roles[-1] == "assistant" else len(roles)
    first = end
    while first and roles[first - 1] != "assistant":
        first -= 1
    return len(roles) if "tool" in roles[first:end] else first


def text_of(
    content: str | Sequence[TextPart | ImagePart | RefusalPart | Other] | None,
    where: str,
    notes: list[str],
    *,
    between: str = "",
    is_asked: bool = False,
    is_answer: bool = False,
    images: list[Image] | None = None,
) -> str:
    """Return the text of a message whose content is at `where` in the request, with `between` between its parts. If the
    model reads images in it, `images` gets them, and each has an `IMAGE_MARK` in the text.

    Raises: as `omit`; RequestError for an image that cannot be read.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    after_placeholder = False
    for index, part in enumerate(content):
        is_placeholder = isinstance(part, Other) or (isinstance(part, ImagePart) and images is None)
        match part:
            case ImagePart() if images is not None:
                images.append(part.image(f"{where}[{index}]"))
                text = IMAGE_MARK
            case ImagePart():
                text = omit("image_url", f"{where}[{index}]", notes, is_asked=is_asked, is_answer=is_answer)
            case Other():
                text = omit(part.kind, f"{where}[{index}]", notes, is_asked=is_asked, is_answer=is_answer)
            case RefusalPart():
                text = part.refusal
            case _:
                text = part.text
        if not text:
            continue
        if texts and IMAGE_MARK not in (text, texts[-1]):
            has_line_end = texts[-1].endswith("\n")
            texts.append("\n" if (is_placeholder or after_placeholder) and not has_line_end else between)
        texts.append(text)
        after_placeholder = is_placeholder
    return "".join(texts)


def omit(kind: str, where: str, notes: list[str], *, is_asked: bool = False, is_answer: bool = False) -> str:
    """Return the placeholder of a part of this kind, which stands on a line of its own, and name it in `notes`.

    In an answer the part is left out, because a model repeats what it finds in its own turns: the placeholder is "".
    Raises: UnsupportedParameter for a part of what the user asks now.
    """
    word = _MEDIA.get(kind, "")
    if is_asked:
        what = f"This model reads no {word}" if word else "This server does not know parts of this kind"
        raise UnsupportedParameter(f"{where}: {what}.", param=where)
    shown = word or printable(kind)
    notes.append(note(where, shown if is_answer else f"{shown}: placeholder"))
    return "" if is_answer else f"[{word or 'part'} omitted]"
