"""Finds out in which format a model writes calls, by its chat template."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import product

import msgspec

from tailrace.text.calls.call_formats import FORMATS, CallFormat
from tailrace.text.calls.call_reader import WholeCall, WholeCallReader
from tailrace.types import CallReading, ToolCall

__all__ = ["detect", "detect_by_markers"]

_AMBIGUOUS = ("<tool_call>",)  # stands before calls of several formats


def detect(
    rendered: Sequence[str], calls: Sequence[ToolCall], tools: Mapping[str, Mapping[str, bool]]
) -> CallFormat | None:
    """Return the first format in which a template has written these calls; None if it is none of them. Each of
    `rendered` has what the template wrote for an answer with the calls, with more or less of what stands before it.
    `tools` is as in `CallReading`."""
    expected = [(call.name, _texts(msgspec.json.decode(call.arguments))) for call in calls]
    for text, known in product(rendered, FORMATS.values()):
        reader = WholeCallReader(CallReading(known.name, tools={name: dict(kinds) for name, kinds in tools.items()}))
        parts = reader.push(text) + reader.flush()
        if [(part.name, _texts(part.arguments)) for part in parts if isinstance(part, WholeCall)] == expected:
            return known
    return None


def _texts(arguments: Mapping[str, object]) -> dict[str, str]:
    """Return the values as texts: some templates write quotes around numbers."""
    return {name: str(value) for name, value in arguments.items()}


def detect_by_markers(template: str, control_tokens: Collection[str]) -> CallFormat | None:
    """Return the format whose markers a template describes, or its model has as control tokens, for a template that
    shows no calls."""
    candidates = ((known, syntax) for known in FORMATS.values() for syntax in known.syntaxes if syntax.opens)
    for known, syntax in sorted(candidates, key=lambda one: -len(one[1].signature)):
        markers = syntax.signature
        if markers != _AMBIGUOUS and all(marker in template or marker in control_tokens for marker in markers):
            return known
    return None
