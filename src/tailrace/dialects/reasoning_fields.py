"""Translates the wires' fields about reasoning into values of the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from tailrace.dialects.facts import ServerFacts
from tailrace.text.reasoning import SWITCHES
from tailrace.types import Message, TemplateValue

__all__ = ["Effort", "effort_values", "reasoning_budget", "switch_values", "unread_reasoning"]

_EFFORT = "reasoning_effort"

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def switch_values(server: ServerFacts, *, on: bool) -> dict[str, TemplateValue]:
    """Return the value that switches reasoning on or off; empty if the template has no such value."""
    name = next((name for name in SWITCHES if name in server.chat.value_names), None)
    return {} if name is None else {name: on}


def effort_values(server: ServerFacts, effort: Effort | None) -> dict[str, TemplateValue]:
    """Return the value that sets the effort of reasoning; empty if the template has no such value."""
    if effort is None:
        return {}
    if _EFFORT in server.chat.value_names:
        return {_EFFORT: effort}
    return switch_values(server, on=False) if effort == "none" else {}


def reasoning_budget(given: int | None, server: ServerFacts, notes: list[str], name: str) -> int | None:
    """Return the most tokens of reasoning, from the field `name`. None: the server's default, which -1 means, too."""
    if given is None or given < 0:
        return None
    if not server.chat.splits_reasoning:
        notes.append(name)
        return None
    return given


def unread_reasoning(
    messages: Sequence[Message], server: ServerFacts, *, continues: bool, name: str
) -> tuple[str, ...]:
    """Return the name of the field if a message has reasoning that the template leaves out."""
    if server.chat.takes_reasoning:
        return ()
    earlier = messages[:-1] if continues and server.chat.splits_reasoning else messages
    return (name,) if any(message.reasoning for message in earlier) else ()
