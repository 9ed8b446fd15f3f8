"""Describes tools in plain text, for models whose chat template does not support them.

Functions are described in the system message, calls are written as the text that `tool_calls` parses, and results are
put into a user turn. Most open models with tools were trained on this format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tailrace.types import Message

__all__ = ["CALL_CLOSE", "CALL_OPEN", "has_tool_turns", "write_tools"]

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_RESULT_OPEN, _RESULT_CLOSE = "<tool_response>", "</tool_response>"


def has_tool_turns(messages: Sequence[Message]) -> bool:
    """Return whether a chat contains tool calls or their results."""
    return any(message.tool_calls or message.role == "tool" for message in messages)


def write_tools(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],  # Any: JSON, as the client sent it
    *,
    has_system: bool,
) -> list[Message]:
    """Write tools, calls and results as text into system, user and assistant turns.

    Without `has_system`, the template does not support system messages, and the tools are described in the first user
    turn. Consecutive results, and a user message directly after them, become one turn, because some templates require
    alternating user and assistant turns.
    """
    turns: list[Message] = []
    for message in messages:
        if message.role == "tool":
            turn = Message("user", f"{_RESULT_OPEN}\n{message.content}\n{_RESULT_CLOSE}")
        else:
            turn = _with_calls(message)
        if turns and turn.role == "user" and turns[-1].role == "user" and turns[-1].content.endswith(_RESULT_CLOSE):
            turns[-1] = replace(turn, content=f"{turns[-1].content}\n{turn.content}")
        else:
            turns.append(turn)
    return _with_description(turns, _description(tools), has_system=has_system) if tools else turns


def _with_calls(message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = [
        f'{CALL_OPEN}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}\n{CALL_CLOSE}'
        for call in message.tool_calls
    ]
    return replace(message, content="\n".join([message.content, *calls] if message.content else calls), tool_calls=())


def _with_description(turns: list[Message], description: str, *, has_system: bool) -> list[Message]:
    role = "system" if has_system else "user"
    index = next((i for i, turn in enumerate(turns) if turn.role == role), None)
    if index is None or (has_system and index > 0):
        return [Message(role, description), *turns]
    content = turns[index].content
    parts = [content, description] if has_system else [description, content]
    joined = "\n\n".join(part for part in parts if part)
    return [*turns[:index], replace(turns[index], content=joined), *turns[index + 1 :]]


def _description(tools: Sequence[Mapping[str, Any]]) -> str:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call functions. Each line describes one as JSON:\n{functions}\n"
        f'To call a function, write {CALL_OPEN}{{"name": <its name>, "arguments": <a JSON object>}}{CALL_CLOSE} and '
        f"nothing else. Its result comes back in {_RESULT_OPEN}{_RESULT_CLOSE}. When you need no function, answer in "
        "plain text."
    )
