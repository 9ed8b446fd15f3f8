"""Anthropic's turns and their blocks of content, as messages in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from tailrace.dialects import (
    ChatMessage,
    FunctionCall,
    ImagePart,
    JsonBody,
    Other,
    ReasoningDetail,
    TextPart,
    ToolCallBody,
    first_asked,
    image_of_base64,
    image_of_url,
    note,
    text_of,
)
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.types import Image

__all__ = ["AnthropicTurn", "TextBlock", "read_turns"]


class _Block(msgspec.Struct):
    cache_control: JsonBody | None = None  # without effect: prefixes are cached anyway


class TextBlock(_Block, tag="text", kw_only=True):
    text: str
    citations: list[JsonBody] | None = None


class Document(_Block, tag="document", kw_only=True):
    source: JsonBody
    title: str | None = None
    context: str | None = None


class ImageSource(msgspec.Struct):
    type: str = ""
    data: str = ""
    media_type: str = ""
    url: str = ""


class ImageBlock(_Block, tag="image", kw_only=True):
    source: ImageSource


class _SourcePart(ImagePart):
    """An image as `text_of` takes it."""

    source: ImageSource

    def image(self, where: str) -> Image:
        """Raises: RequestError."""
        match self.source.type:
            case "base64":
                return image_of_base64(self.source.data, f"{where}.source.data")
            case "url":
                return image_of_url(self.source.url, f"{where}.source.url")
        raise UnsupportedParameter(f"{where}.source: send the image itself, as base64.", param=f"{where}.source")


class SearchResult(_Block, tag="search_result", kw_only=True):
    content: list[TextBlock | Other]
    title: str = ""
    source: str = ""


class ToolReference(_Block, tag="tool_reference", kw_only=True):
    tool_name: str


class CompactionBlock(_Block, tag="compaction", kw_only=True):
    """A summary that stands for earlier turns."""

    content: str | None = None


_Text: TypeAlias = TextBlock | ImageBlock | Document | SearchResult | ToolReference | CompactionBlock | Other


class ToolUse(_Block, tag="tool_use", kw_only=True):
    id: str
    name: str
    input: Any = None  # Any: JSON


class ToolResult(_Block, tag="tool_result", kw_only=True):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | Document | SearchResult | ToolReference | Other] | None = None


class Thinking(_Block, tag="thinking", kw_only=True):
    thinking: str
    signature: str = ""


class AnthropicTurn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: (
        str
        | list[
            TextBlock
            | ImageBlock
            | Document
            | SearchResult
            | ToolReference
            | CompactionBlock
            | ToolUse
            | ToolResult
            | Thinking
            | Other
        ]
    )


def read_turns(
    system: str | Sequence[TextBlock | Other] | None,
    turns: Sequence[AnthropicTurn],
    notes: list[str],
    images: list[Image] | None = None,
) -> list[ChatMessage]:
    """Return the messages for the chat template; results of tools are separate messages. `images` gets the images of
    users; None: the model reads none. Raises: RequestError."""
    messages: list[ChatMessage] = []
    text = _text(system, "system", notes)
    if text:
        messages.append(ChatMessage("system", [TextPart(text)], reasoning_details=[]))
    asked_from = first_asked(["tool" if _results_of(turn) else turn.role for turn in turns])
    for index, turn in enumerate(turns):
        is_asked = index >= asked_from and turn.role == "user"
        _add(messages, turn, f"messages[{index}]", notes, images, is_asked=is_asked)
    return messages


def _results_of(turn: AnthropicTurn) -> list[tuple[int, ToolResult]]:
    blocks = () if isinstance(turn.content, str) else turn.content
    return [(index, block) for index, block in enumerate(blocks) if isinstance(block, ToolResult)]


def _add(
    messages: list[ChatMessage],
    turn: AnthropicTurn,
    where: str,
    notes: list[str],
    images: list[Image] | None,
    *,
    is_asked: bool,
) -> None:
    """Add the messages of a turn. Raises: RequestError."""
    blocks = () if isinstance(turn.content, str) else turn.content
    calls = [block for block in blocks if isinstance(block, ToolUse)]
    results = _results_of(turn)
    thoughts = [block.thinking for block in blocks if isinstance(block, Thinking)]
    is_answer = turn.role == "assistant"
    if ((calls or thoughts) and not is_answer) or (results and turn.role != "user"):
        raise RequestError(
            f"{where}: only assistant turns have tool_use and thinking, and only user turns tool_result.",
            param="messages",
        )
    for index, result in results:
        content = _text(result.content, f"{where}.content[{index}].content", notes)
        messages.append(ChatMessage("tool", content, tool_call_id=result.tool_use_id))
    seen = images if turn.role == "user" else None
    text = _text(turn.content, f"{where}.content", notes, is_asked=is_asked, is_answer=is_answer, images=seen)
    if not text and not calls and not any(thoughts):
        if not results and not is_answer:
            notes.append(note(where, "empty"))
        return
    before = messages[-1] if messages else None
    if before is None or before.role != turn.role or before.tool_calls:
        before = ChatMessage(turn.role, [], reasoning_details=[])
        messages.append(before)
    parts, details = before.content, before.reasoning_details
    assert isinstance(parts, list)
    assert details is not None
    if text:
        parts.append(TextPart("\n" + text if parts else text))
    for thought in filter(None, thoughts):
        details.append(ReasoningDetail("\n" + thought if details else thought))
    before.tool_calls = [ToolCallBody(FunctionCall(call.name, call.input), id=call.id) for call in calls] or None


def _text(
    content: str | Sequence[_Text | ToolUse | ToolResult | Thinking] | None,
    where: str,
    notes: list[str],
    *,
    is_asked: bool = False,
    is_answer: bool = False,
    images: list[Image] | None = None,
) -> str:
    """Return the text of blocks. Raises: as `text_of`."""
    parts = content if content is None or isinstance(content, str) else [_part(block) for block in content]
    return text_of(parts, where, notes, between="\n", is_asked=is_asked, is_answer=is_answer, images=images)


def _part(block: _Text | ToolUse | ToolResult | Thinking) -> TextPart | ImagePart | Other:
    """Return the text of a block for its turn. Calls, results and thoughts have none."""
    match block:
        case Other():
            return block
        case TextBlock():
            return TextPart(block.text)
        case ImageBlock():
            return _SourcePart(block.source)
        case ToolReference():
            return TextPart(block.tool_name)
        case CompactionBlock():
            return TextPart(block.content or "")
        case SearchResult():
            texts = [part.text for part in block.content if isinstance(part, TextBlock)]
            return TextPart("\n".join(filter(None, (block.title, block.source, *texts))))
        case Document():
            text = _plain_text(block.source)
            return Other("document") if text is None else TextPart("\n".join(filter(None, (block.title, text))))
    return TextPart("")


def _plain_text(source: JsonBody) -> str | None:
    """Return the text of a document; None if it is a file or an address."""
    text = source.get("data") if source.get("type") == "text" else source.get("content")
    if isinstance(text, list):
        texts = [part.get("text") for part in text if isinstance(part, dict) and part.get("type") == "text"]
        return "\n".join(one for one in texts if isinstance(one, str))
    return text if isinstance(text, str) else None
