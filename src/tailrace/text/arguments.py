"""The arguments of tool calls in a history, in the form that chat templates need: the text of a JSON object."""

from __future__ import annotations

import msgspec

from tailrace.text.templates import is_deeper

__all__ = ["UNREADABLE", "arguments_object"]

UNREADABLE = "INVALID_JSON"  # the name under which Anthropic's API returns arguments that are not JSON


def arguments_object(given: object) -> str:
    """Return arguments as the text of a JSON object. Templates iterate over it, and fail on anything else.

    Nothing (null, an empty text, an empty list) is `{}`. What is not an object, such as the beginning of a call that
    `max_tokens` has cut off, becomes `{"INVALID_JSON": its text}`.
    """
    if isinstance(given, str):
        value = _read(given)
        if isinstance(value, dict):
            return given
        text = given
    else:
        value = given
        text = msgspec.json.encode(given).decode()
        if isinstance(value, dict):
            return text
    return "{}" if value in (None, []) else msgspec.json.encode({UNREADABLE: text}).decode()


def _read(text: str) -> object:
    """Return the JSON in a text: None for an empty one, the text itself if it is not JSON, or is nested too deeply."""
    if not text.strip():
        return None
    try:
        value: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return text
    return text if is_deeper(value) else value
