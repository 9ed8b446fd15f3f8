"""A conversation that is imported from a file, before it is stored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from tailrace.conversations.items import MAX_TITLE, Conversation, Item
from tailrace.errors import RequestError

__all__ = ["Draft", "Json", "as_shape", "call_of", "clean", "draft_of", "seconds"]

Json = dict[str, Any]  # Any: whatever a file has
T = TypeVar("T")
_LAST_S = 253_402_300_799.0  # the end of the year 9999
_LOCATION = re.compile(r" - at `\$(.*)`$")


@dataclass(frozen=True, slots=True)
class Draft:
    """An imported conversation. Items come after their parents. `num_left_out` messages were skipped."""

    conversation: Conversation
    items: list[Item]
    num_left_out: int = 0


def draft_of(
    items: list[Item],
    head: str | None,
    *,
    title: str | None,
    created_s: float | None,
    updated_s: float | None,
    num_left_out: int = 0,
    metadata: dict[str, str] | None = None,
) -> Draft:
    created = seconds(created_s)
    conversation = Conversation(
        title=clean(title or "")[:MAX_TITLE],
        created_s=created,
        updated_s=seconds(updated_s) or created,
        metadata=metadata or {},
        head=head,
    )
    return Draft(conversation, items, num_left_out)


def as_shape(value: object, shape: type[T], where: str) -> T:
    """Convert a value to a type. Raises: RequestError with the position in the file, without its content."""
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        location = _LOCATION.search(str(error))
        param = re.sub(r"\[[^]0-9][^]]*\]", "[…]", f"{where}{location[1] if location else ''}")  # keys are content
        reason = re.sub(r"'.*'", "", str(error).partition(" - at ")[0])
        raise RequestError(f"{param}: {reason[:200].rstrip()}.", param=param[:100]) from None


def seconds(given: float | None) -> float:
    """Return a time since the epoch; 0 if it is missing or out of range."""
    return given if given is not None and 0 <= given <= _LAST_S else 0.0


def clean(text: str) -> str:
    """Replace NUL characters, which databases reject."""
    return text.replace("\0", "\ufffd")


def call_of(text: str, name: str, call_id: str) -> Item | None:
    """Return a function call, or None if the text is not a JSON object of arguments."""
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not name or not isinstance(arguments, dict):
        return None
    return Item(kind="function_call", text=clean(text), name=clean(name)[:64], call_id=clean(call_id)[:200])
