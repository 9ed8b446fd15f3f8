"""Which parts of whole answers are checked against which schema of the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import structs

from tailrace.schemas.answer_check import SchemasAsked
from tailrace.text.calls import WholeCall, WholeCallReader, parameters_of
from tailrace.types import Record, TextDelta

__all__ = ["Pair", "to_check"]

Pair: TypeAlias = tuple[str, Any, str]  # what it is, for people; its schema as JSON; its text


def to_check(record: Record, answers: Sequence[Sequence[TextDelta]]) -> list[Pair]:
    """Return what to check at the end of a stream; nothing if its grammar keeps everything. An answer that ended at a
    limit is not whole, and is not checked."""
    grammar = record.sampling.grammar
    if grammar is None or not grammar.asked:
        return []
    asked = msgspec.json.decode(grammar.asked, type=SchemasAsked)
    pairs: list[Pair] = []
    for number, deltas in enumerate(answers):
        if deltas and deltas[-1].finish_reason in ("stop", "tool_calls"):
            prompt = record.prompts[number // record.sampling.n]
            text = "".join(delta.text for delta in deltas)
            parts: list[str | WholeCall] = [text]
            if prompt.calls is not None:
                tools = ({"function": {"name": name, "parameters": one}} for name, one in asked.arguments.items())
                reader = WholeCallReader(structs.replace(prompt.calls, tools=parameters_of(tools)))
                parts = reader.push(text) + reader.flush()
            prefix = f"answer {number}: " if record.num_choices > 1 else ""
            pairs += _of_answer(parts, asked, prefix)
    return pairs


def _of_answer(parts: Sequence[str | WholeCall], asked: SchemasAsked, prefix: str) -> list[Pair]:
    calls = [part for part in parts if isinstance(part, WholeCall)]
    if not calls:
        text = "".join(part for part in parts if isinstance(part, str))
        return [] if asked.answer is None else [(prefix, asked.answer, text)]
    named = ((f"{prefix}{call.name}: ", asked.arguments.get(call.name), call.arguments) for call in calls)
    return [(name, schema, msgspec.json.encode(value).decode()) for name, schema, value in named if schema is not None]
