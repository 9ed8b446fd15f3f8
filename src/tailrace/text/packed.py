"""Text for a model whose vocabulary nobody here knows: token ids that are the bytes themselves.

A server that already runs takes text and gives text. So that all else can go on in ids, each id *is* a piece of UTF-8:
a single byte is its own id, and two to six bytes are the number that they spell behind a byte of 1. That stays below
2**53, where JSON in JavaScript ends, and one id is roughly what one token of a real vocabulary is.

How a text is cut into ids is of no account, since that depends on how it came over the wire: two runs of a sequence are
compared byte by byte (`ByteTokenizer.comparable`).

Chats go to such a server as messages, for it has the template. `MessageEncoder` writes them as JSON between two ids
that no text can produce; what stands behind the second one is the beginning of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.text.chat import ChatEncoder
from tailrace.text.templates import Turn
from tailrace.text.tokenizer import Tokenizer, utf8_bytes
from tailrace.types import Message, ReasoningFormat, TemplateValue

__all__ = ["CHAT_ID", "END_ID", "ByteTokenizer", "MessageEncoder", "PackedChat", "pack", "unpack"]

_PIECE_BYTES = 6
_LEAST_PIECE_ID = 1 << 16  # of two bytes behind the byte of 1
CHAT_ID = 256  # before and behind a chat
END_ID = 257  # where an answer ended with nothing more to say
_SPECIAL_IDS = frozenset({CHAT_ID, END_ID})


def pack(text: bytes) -> tuple[int, ...]:
    """As few ids as these bytes take."""
    return tuple(
        text[start] if start + 1 == len(text) else int.from_bytes(b"\1" + text[start : start + _PIECE_BYTES])
        for start in range(0, len(text), _PIECE_BYTES)
    )


def unpack(token_ids: Sequence[int]) -> bytes:
    """The bytes that these ids are. Raises: ValueError for ids that are none."""
    return b"".join(map(_piece, token_ids))


def _piece(token_id: int) -> bytes:
    if 0 <= token_id < 256:
        return bytes((token_id,))
    size = (token_id.bit_length() - 1) // 8
    if token_id < _LEAST_PIECE_ID or size > _PIECE_BYTES or token_id >> 8 * size != 1:
        raise ValueError("no piece of text")
    return token_id.to_bytes(size + 1)[1:]


class _Pieces:
    """The bytes of each id, computed: there are too many to list."""

    def __getitem__(self, token_id: int) -> bytes:
        """Raises: RequestError for an id that is no piece of text, since it is a client's prompt that has such."""
        if token_id in _SPECIAL_IDS:
            return b""
        try:
            return _piece(token_id)
        except ValueError:
            raise RequestError(
                "This server knows no token ids but those of its own answers; send text.", param="prompt"
            ) from None


class _Texts:
    """What each id shows on its own: None where that is half a character, "" for what is no text."""

    def __getitem__(self, token_id: int) -> str | None:
        try:
            return _piece(token_id).decode()
        except UnicodeDecodeError:
            return None
        except ValueError:
            return ""


class ByteTokenizer(Tokenizer):
    """The vocabulary of all texts. It has no control tokens that a text could spell."""

    vocab_size = 2 << 8 * _PIECE_BYTES
    special_ids = _SPECIAL_IDS
    bos_ids = ()
    max_piece_bytes = _PIECE_BYTES
    strip_leading_space = False

    def __init__(self) -> None:
        # Lists as far as anybody looks: they are read by id, and nothing else.
        self.pieces = cast("list[bytes]", _Pieces())
        self.texts = cast("list[str | None]", _Texts())
        self.control_tokens = {}
        self._lost = b""

    def encode(self, text: str, *, special: bool, bos: bool = False) -> list[int]:
        return list(pack(utf8_bytes(text)))

    def offsets(self, text: str, *, bos: bool = False) -> list[tuple[int, int, int]]:
        """A character that is cut is in the range of both its ids."""
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
    """Whether it goes on with a character that another byte began."""
    return byte & 0xC0 == 0x80


class PackedChat(msgspec.Struct):
    """A chat as it stands in a prompt, in OpenAI's words."""

    messages: list[dict[str, Any]]  # Any: what OpenAI's API takes
    tools: list[dict[str, Any]] = []
    values: dict[str, TemplateValue] = {}  # for the template, by name


class MessageEncoder(ChatEncoder):
    """Chats for a server that has the template. With `continues`, it goes on with a message that is left open."""

    value_names: frozenset[str] = frozenset()  # which that server's template asks for is not known
    takes_reasoning = False

    def __init__(self, *, continues: bool, reasoning: ReasoningFormat | None = None) -> None:
        self._continues = continues
        self.reasoning = reasoning

    @property
    def takes_tools(self) -> bool:
        """Its template may have no place for them; then that server refuses them."""
        return True

    def knows(self, name: str) -> bool:
        """That server has to know."""
        return True

    def reasoning_behind(
        self, messages: Sequence[Message], ids: Sequence[int], *, continue_final: bool, without_reasoning: bool = False
    ) -> ReasoningFormat | None:
        return None if continue_final and messages[-1].content else self.reasoning

    def offsets(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int, int]]]:
        """Raises: UnsupportedParameter, always."""
        raise UnsupportedParameter("The chat template is another server's, and is not known here.", param="messages")

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Turn] = (),
        values: Mapping[str, TemplateValue] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        without_reasoning: bool = False,
    ) -> list[int]:
        """The messages, tools and all. With `continue_final` the last one is the beginning of the answer.

        Raises: UnsupportedParameter if such an answer cannot be continued; RequestError for text with lone surrogates.
        """
        if continue_final and not self._continues:
            raise UnsupportedParameter("The server behind this one does not continue a message.", param="messages")
        beginning = messages[-1].content if continue_final else ""
        said = [_spoken(message) for message in (messages[:-1] if continue_final else messages)]
        chat = PackedChat(said, list(tools), dict(values or {}))
        try:
            written = msgspec.json.encode(chat)
        except UnicodeEncodeError:
            raise RequestError("The text is not valid Unicode: it has a lone surrogate.") from None
        return [CHAT_ID, *pack(written), CHAT_ID, *pack(utf8_bytes(beginning))]


def _spoken(message: Message) -> dict[str, Any]:
    """A message in the form of OpenAI's API."""
    spoken: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        spoken["content"] = message.content or None
        spoken["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        spoken["tool_call_id"] = message.tool_call_id
    return spoken
