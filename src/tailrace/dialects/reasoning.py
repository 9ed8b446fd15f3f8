"""What wires ask about reasoning, in the words that the model's chat template knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from tailrace.dialects.wire import ServerFacts
from tailrace.text.reasoning import SWITCHES
from tailrace.types import Message, TemplateValue

__all__ = ["Effort", "effort_values", "switch_values", "unread_reasoning"]

_EFFORT = "reasoning_effort"

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def switch_values(server: ServerFacts, *, on: bool) -> dict[str, TemplateValue]:
    """What tells the template whether to think; nothing where it cannot be told."""
    name = next((name for name in SWITCHES if name in server.template_values), None)
    return {} if name is None else {name: on}


def effort_values(server: ServerFacts, effort: Effort | None) -> dict[str, TemplateValue]:
    """What tells the template how much to think; nothing where it cannot be told."""
    if effort is None:
        return {}
    if _EFFORT in server.template_values:
        return {_EFFORT: effort}
    return switch_values(server, on=False) if effort == "none" else {}


def unread_reasoning(
    messages: Sequence[Message], server: ServerFacts, *, continues: bool, name: str
) -> tuple[str, ...]:
    """The name of the field, if some message has reasoning that the model does not get to see."""
    if server.takes_reasoning:
        return ()
    earlier = messages[:-1] if continues and server.splits_reasoning else messages
    return (name,) if any(message.reasoning for message in earlier) else ()
