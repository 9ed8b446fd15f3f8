"""Prompts and answers of models with an unknown vocabulary, on an upstream server.

Prompts are passed on as text (`TextSegment`). Chats are passed on as messages, because the server has the template:
`MessageEncoder` writes them as JSON. Only their number of tokens is estimated, until the server has counted them.

Answers come as text. The log has ids of answers, so each id is a piece of UTF-8: a single byte
is its own id, and two to six bytes are the big-endian number of a byte 1 followed by these bytes. Ids stay below 2**53,
the limit of integers in JavaScript, and one id is about as long as a token of a real vocabulary.

The same text may be split into ids in different ways, because this depends on the chunks on the wire. So two runs of a
sequence are compared byte by byte (`ByteTokenizer.comparable`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.models import ModelCard
from tailrace.text import UNKNOWN, CallFormat, ChatEncoder, ChatFacts, Tokenizer, Turn, utf8_bytes
from tailrace.types import (
    IMAGE_MARK,
    Attachment,
    Infill,
    Message,
    ReasoningFormat,
    Segment,
    TemplateValue,
    TextSegment,
)

__all__ = [
    "ATTACHMENT",
    "CHAT_ID",
    "END_ID",
    "ByteTokenizer",
    "ChatBody",
    "MessageEncoder",
    "pack",
    "text_of",
    "text_segment",
    "unpack",
]

_PIECE_BYTES = 6
_LEAST_PIECE_ID = 1 << 16  # of two bytes after the byte 1
CHAT_ID = 256  # before and after the JSON of a chat, in prompts that earlier versions kept
END_ID = 257  # the end of an answer, if there is no more text
ATTACHMENT = "attachment:"  # before the digest of an image, in the JSON of a chat
_IMAGE_TOKENS = 1000  # estimated; models read 64 to 4,000
_SPECIAL_IDS = frozenset({CHAT_ID, END_ID})


def pack(text: bytes) -> tuple[int, ...]:
    """Encode bytes as ids."""
    return tuple(
        text[start] if start + 1 == len(text) else int.from_bytes(b"\1" + text[start : start + _PIECE_BYTES])
        for start in range(0, len(text), _PIECE_BYTES)
    )


def unpack(token_ids: Sequence[int]) -> bytes:
    """Decode ids to bytes. Raises: ValueError for invalid ids."""
    return b"".join(map(_piece, token_ids))


def _piece(token_id: int) -> bytes:
    if 0 <= token_id < 256:
        return bytes((token_id,))
    size = (token_id.bit_length() - 1) // 8
    if token_id < _LEAST_PIECE_ID or size > _PIECE_BYTES or token_id >> 8 * size != 1:
        raise ValueError("no piece of text")
    return token_id.to_bytes(size + 1)[1:]


def text_segment(text: str, *, is_chat: bool = False) -> TextSegment:
    """Return text as it is passed on. Raises: RequestError for text with lone surrogates."""
    return TextSegment(text, -(-len(utf8_bytes(text)) // _PIECE_BYTES), is_chat)


def _end_of(segment: TextSegment, num_tokens: int) -> TextSegment:
    text = segment.text.encode()
    return text_segment(text[max(0, len(text) - num_tokens * _PIECE_BYTES) :].decode("utf-8", "ignore"))


def _start_of(segment: TextSegment, num_tokens: int) -> TextSegment:
    return text_segment(segment.text.encode()[: num_tokens * _PIECE_BYTES].decode("utf-8", "ignore"))


class _Pieces:
    """The bytes of each id, computed on access."""

    def __getitem__(self, token_id: int) -> bytes:
        """Raises: RequestError for an invalid id, which can only come from a client's prompt."""
        if token_id in _SPECIAL_IDS:
            return b""
        try:
            return _piece(token_id)
        except ValueError:
            raise RequestError(
                "This model accepts only token ids of its own answers. Send text instead.", param="prompt"
            ) from None


class _Texts:
    """The text of each single id: None if it is not whole characters, "" if it is not text."""

    def __getitem__(self, token_id: int) -> str | None:
        try:
            return _piece(token_id).decode()
        except UnicodeDecodeError:
            return None
        except ValueError:
            return ""


class ByteTokenizer(Tokenizer):
    """A tokenizer for any text. It has no control tokens that text could contain."""

    vocab_size = 2 << 8 * _PIECE_BYTES
    special_ids = _SPECIAL_IDS
    bos_ids = ()
    max_piece_bytes = _PIECE_BYTES
    infill_ends = ()

    def __init__(self, *, can_infill: bool = False) -> None:
        self.can_infill = can_infill
        # Used like lists: callers only read them by id.
        self.pieces = cast("list[bytes]", _Pieces())
        self.texts = cast("list[str | None]", _Texts())
        self.all_texts = self.texts
        self.control_tokens = {}
        self._lost = b""

    def segments(self, text: str, *, bos: bool) -> tuple[Segment, ...]:
        return (text_segment(text),) if text else ()

    def infill(self, asked: Infill, *, bos: bool, room: int | None = None) -> tuple[Segment, ...]:
        """As `Tokenizer.infill`. That server's API has no field for other files, so they are text before the prompt."""
        before, after = text_segment(asked.before), text_segment(asked.after)
        others = "".join(f"{text}\n\n" for _, text in asked.files)
        if room is not None:
            num_before = min(before.num_tokens, max(room * 3 // 4, room - after.num_tokens, 1))
            after = _start_of(after, room - num_before)
            others, before = "", _end_of(text_segment(others + before.text), room - after.num_tokens)
        before = text_segment(others + before.text)
        return (TextSegment(before.text, before.num_tokens + after.num_tokens, after=after.text),)

    def last_tokens(self, segments: tuple[Segment, ...], num_tokens: int) -> tuple[Segment, ...]:
        match segments:
            case (TextSegment(is_chat=False) as text,) if text.num_tokens > num_tokens:
                return (_end_of(text, num_tokens),)
        return super().last_tokens(segments, num_tokens)

    def encode(self, text: str, *, special: bool, bos: bool = False) -> list[int]:
        return list(pack(utf8_bytes(text)))

    def offsets(self, text: str, *, bos: bool = False) -> list[tuple[int, int, int]]:
        """As `Tokenizer.offsets`. A character that is split over two ids is in the range of both."""
        found, num_begun = [], 0
        for token_id in pack(utf8_bytes(text)):
            piece = _piece(token_id)
            num_before = num_begun - _is_inside(piece[0])
            num_begun += sum(not _is_inside(byte) for byte in piece)
            found.append((token_id, num_before, num_begun))
        return found

    def comparable(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        ids: list[int] = []
        for token_id in token_ids:
            ids += (token_id,) if token_id in _SPECIAL_IDS else _piece(token_id)
        return tuple(ids)


def _is_inside(byte: int) -> bool:
    """Return whether a byte is a continuation byte of UTF-8."""
    return byte & 0xC0 == 0x80


class ChatBody(msgspec.Struct):
    """A chat in a `TextSegment`, in the format of OpenAI's API."""

    messages: list[dict[str, Any]]  # Any: what OpenAI's API takes
    tools: list[dict[str, Any]] = []
    values: dict[str, TemplateValue] = {}  # for the template, by name


class MessageEncoder(ChatEncoder):
    """Encodes chats for a server that has the template. `continues`: the server can continue an unfinished message.
    That server reads tool calls itself. Where it does not, their text is recognised in every known format, or in
    `calls`."""

    def __init__(
        self, *, continues: bool, reasoning: ReasoningFormat | None = None, calls: CallFormat | None = None
    ) -> None:
        self._continues = continues
        self.reasoning = reasoning
        self.calls = calls or UNKNOWN  # the server refuses tools itself if its template does not support them
        # Which values that server's template asks for is not known.
        self.facts = ChatFacts(True, self.calls.name, splits_reasoning=reasoning is not None, shows_images=True)

    def knows(self, name: str) -> bool:
        """Always true: the server checks the names itself."""
        return True

    def reasoning_after(
        self,
        messages: Sequence[Message],
        prompt: tuple[Segment, ...],
        *,
        continue_final: bool,
        without_reasoning: bool = False,
    ) -> ReasoningFormat | None:
        return None if continue_final and messages[-1].content else self.reasoning

    def offsets(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int, int]]]:
        """Raises: UnsupportedParameter, always."""
        raise UnsupportedParameter(
            "The chat template is on another server, so its prompt is unknown.", param="messages"
        )

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Turn] = (),
        values: Mapping[str, TemplateValue] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        without_reasoning: bool = False,
    ) -> tuple[Segment, ...]:
        """Encode messages and tools. With `continue_final`, the last message is the beginning of the answer.

        Raises: UnsupportedParameter if such an answer cannot be continued; RequestError for text with lone surrogates.
        """
        if continue_final and not self._continues:
            raise UnsupportedParameter("The upstream server cannot continue a message.", param="messages")
        beginning = messages[-1].content if continue_final else ""
        turns = [_openai_message(message) for message in (messages[:-1] if continue_final else messages)]
        chat = ChatBody(turns, list(tools), dict(values or {}))
        try:
            written = msgspec.json.encode(chat).decode()
        except UnicodeEncodeError:
            raise RequestError("The text is not valid Unicode: it has a lone surrogate.") from None
        images = (image for message in messages for image in message.images)
        seen = tuple(Attachment(image.digest, image.media_type, _IMAGE_TOKENS) for image in images)
        return (text_segment(written, is_chat=True), *seen, *((text_segment(beginning),) if beginning else ()))


def text_of(
    card: ModelCard, reasoning: ReasoningFormat | None, calls: CallFormat | None
) -> tuple[Tokenizer, ChatEncoder]:
    """Return how the texts of an upstream server's model are written, as `Kind.text_of`."""
    encoder = MessageEncoder(continues=card.architecture != "openai", reasoning=reasoning, calls=calls)
    return ByteTokenizer(can_infill=card.can_infill), encoder


def _openai_parts(message: Message) -> list[dict[str, Any]]:
    """Return the parts of a message with images. Each image is named by its digest, by which the engine finds it."""
    first, *texts = message.content.split(IMAGE_MARK)
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}] if first else []
    for image, text in zip(message.images, texts, strict=True):
        parts.append({"type": "image_url", "image_url": {"url": ATTACHMENT + image.digest}})
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def _openai_message(message: Message) -> dict[str, Any]:
    """Convert a message to the format of OpenAI's API."""
    spoken: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.images:
        spoken["content"] = _openai_parts(message)
    if message.tool_calls:
        spoken["content"] = message.content or None
        spoken["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        spoken["tool_call_id"] = message.tool_call_id
    return spoken
