"""Describes tools in plain text, for models whose chat template does not support them.

Functions are described in the system message, calls are written in the model's format (`calls`), and results are put
into a user turn. Without a format of its own a model gets that of Hermes, on which most open models were trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tailrace.text.calls import CallFormat
from tailrace.types import Message

__all__ = ["has_tool_turns", "write_results", "write_tools"]

_RESULT_OPEN, _RESULT_CLOSE = "<tool_response>", "</tool_response>"


def has_tool_turns(messages: Sequence[Message]) -> bool:
    """Return whether a chat contains tool calls or their results."""
    return any(message.tool_calls or message.role == "tool" for message in messages)


def write_tools(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],  # Any: JSON, as the client sent it
    calls: CallFormat,
    *,
    has_system: bool,
) -> list[Message]:
    """Write tools, calls and results as text into system, user and assistant turns.

    Without `has_system`, the template does not support system messages, and the tools are described in the first user
    turn.
    """
    turns = write_results([_with_calls(message, calls) for message in messages])
    return _with_description(turns, _description(tools, calls), has_system=has_system) if tools else turns


def write_results(messages: Sequence[Message]) -> list[Message]:
    """Write results as text into user turns. Consecutive results, and a user message directly after them, become one
    turn, because some templates require alternating user and assistant turns."""
    turns: list[Message] = []
    for message in messages:
        turn = message
        if message.role == "tool":
            turn = Message("user", f"{_RESULT_OPEN}\n{message.content}\n{_RESULT_CLOSE}", images=message.images)
        if turns and turn.role == "user" and turns[-1].role == "user" and turns[-1].content.endswith(_RESULT_CLOSE):
            content, images = f"{turns[-1].content}\n{turn.content}", turns[-1].images + turn.images
            turns[-1] = replace(turn, content=content, images=images)
        else:
            turns.append(turn)
    return turns


def _with_calls(message: Message, calls: CallFormat) -> Message:
    if not message.tool_calls:
        return message
    written = [calls.write(call.name, call.arguments or "{}") for call in message.tool_calls]
    content = "\n".join([message.content, *written] if message.content else written)
    return replace(message, content=content, tool_calls=())


def _with_description(turns: list[Message], description: str, *, has_system: bool) -> list[Message]:
    role = "system" if has_system else "user"
    index = next((i for i, turn in enumerate(turns) if turn.role == role), None)
    if index is None or (has_system and index > 0):
        return [Message(role, description), *turns]
    content = turns[index].content
    parts = [content, description] if has_system else [description, content]
    joined = "\n\n".join(part for part in parts if part)
    return [*turns[:index], replace(turns[index], content=joined), *turns[index + 1 :]]


def _description(tools: Sequence[Mapping[str, Any]], calls: CallFormat) -> str:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = calls.write("name_of_function", '{"name_of_argument": "value"}')
    return (
        f"You can call functions. Each line describes one as JSON:\n{functions}\n"
        f"To call a function, write this and nothing else:\n{example}\n"
        f"Its result comes back in {_RESULT_OPEN}{_RESULT_CLOSE}. When you need no function, answer in plain text."
    )
