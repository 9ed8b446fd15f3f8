"""Parts of messages. Models read only text here, so a part of another kind becomes a short placeholder, and is named.

What the user asks about now must be complete: an image in it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tailrace.dialects.bodies import printable
from tailrace.dialects.shapes import Other, note
from tailrace.errors import UnsupportedParameter

__all__ = ["RefusalPart", "TextPart", "first_asked", "omit", "text_of"]

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


class RefusalPart(msgspec.Struct, tag="refusal"):
    refusal: str


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
    content: str | Sequence[TextPart | RefusalPart | Other] | None,
    where: str,
    notes: list[str],
    *,
    between: str = "",
    is_asked: bool = False,
    is_answer: bool = False,
) -> str:
    """Return the text of a message whose content is at `where` in the request, with `between` between its parts.

    Raises: as `omit`.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    after_placeholder = False
    for index, part in enumerate(content):
        is_placeholder = isinstance(part, Other)
        match part:
            case Other():
                text = omit(part.kind, f"{where}[{index}]", notes, is_asked=is_asked, is_answer=is_answer)
            case RefusalPart():
                text = part.refusal
            case _:
                text = part.text
        if not text:
            continue
        if texts:
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
        what = f"This server reads only text, and no {word}" if word else "This server does not know parts of this kind"
        raise UnsupportedParameter(f"{where}: {what}.", param=where)
    shown = word or printable(kind)
    notes.append(note(where, shown if is_answer else f"{shown}: placeholder"))
    return "" if is_answer else f"[{word or 'part'} omitted]"
