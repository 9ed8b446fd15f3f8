"""The form in which an engine gets the grammar of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tailrace.engines.grammars.lark import to_lark
from tailrace.schemas import Reach
from tailrace.schemas.answer_check import SchemasAsked
from tailrace.schemas.calls import AskedCalls, PlainCalls, plain_calls, schema_of_call
from tailrace.schemas.conjunction import SchemaError
from tailrace.schemas.plain import plain_form
from tailrace.schemas.portable import check_portable
from tailrace.schemas.references import pointer
from tailrace.schemas.structural_tags import TagParts, read_structural_tag
from tailrace.text.calls import FORMATS, CallFormat
from tailrace.text.calls.written import AnswerParts, CallParts, call_parts, surroundings
from tailrace.types import Grammar

__all__ = ["engine_form"]

_decode = msgspec.json.decode


def engine_form(grammar: Grammar, call_format: str, reach: Reach, control_tokens: Mapping[str, int]) -> Grammar:
    """Return a grammar of this reach, for all but regular expressions. `call_format`: in which the model writes calls;
    "" if it was not trained for them. Takes up to a second. Raises: SchemaError."""
    if grammar.kind == "json_schema":
        return _of_schema(grammar, reach)
    if grammar.kind in ("cfg", "tags"):
        if reach.is_passed_on:
            return grammar
        if not reach.has_parts:
            raise SchemaError("this engine takes only JSON schemas and regular expressions")
        return _of_cfg(grammar) if grammar.kind == "cfg" else _of_tags(grammar, reach, control_tokens)
    return _of_calls(grammar, FORMATS.get(call_format), reach, control_tokens)


def _of_schema(grammar: Grammar, reach: Reach) -> Grammar:
    asked = _decode(grammar.source)
    plain = plain_form(asked, reach)
    if reach.is_passed_on:
        return replace(grammar, asked=_asked(SchemasAsked(asked)))
    left_open = tuple(grammar.param + path for path in plain.left_open)
    return replace(
        grammar,
        source=_source(plain.schema, reach),
        left_open=left_open,
        asked=_asked(SchemasAsked(asked)) if left_open else "",
    )


def _of_calls(grammar: Grammar, form: CallFormat | None, reach: Reach, control_tokens: Mapping[str, int]) -> Grammar:
    """Return a grammar for calls in the form of the model. Where there is none, a forced call is plain JSON, and an
    answer that may be a text is free."""
    asked, param = _decode(grammar.source, type=AskedCalls), grammar.param
    plain = plain_calls(asked, reach)
    left_open = plain.left_open
    arguments = {tool.name: tool.schema for tool in asked.tools}
    schemas = _asked(SchemasAsked(None if asked.forced else asked.answer, arguments))
    calls = _calls(form, plain) if reach.has_parts and form is not None else None
    if form is not None and calls is not None:
        for tool, call in zip(asked.tools, calls, strict=True):
            left_open += tuple(pointer(f"{tool.where}#", "properties", name) for name in call.open_names)
        parts = _answer(form, calls, plain.answer, control_tokens, may_repeat=not asked.forced)
        source = msgspec.json.encode(parts).decode()
        return Grammar("parts", source, param, schemas if left_open else "", left_open)
    if asked.forced:
        try:
            source = _source(schema_of_call(plain), reach)
        except SchemaError:
            if not reach.is_last:
                raise
            source = _source(schema_of_call(_any_arguments(plain)), reach)
            left_open = tuple(tool.where for tool in asked.tools)
        return Grammar("json_schema", source, param, schemas if left_open else "", left_open)
    return Grammar("free", "", param, schemas, (asked.answer_param, *left_open))


def _of_cfg(grammar: Grammar) -> Grammar:
    try:
        return replace(grammar, kind="lark", source=to_lark(grammar.source))
    except ValueError as error:
        raise SchemaError(str(error)) from None


def _of_tags(grammar: Grammar, reach: Reach, control_tokens: Mapping[str, int]) -> Grammar:
    found = TagParts(read_structural_tag(_decode(grammar.source)), reach)
    texts = "\0".join(found.texts)
    tokens = {text: token_id for text, token_id in control_tokens.items() if text and text in texts}
    source = msgspec.json.encode(AnswerParts([found.parts], tokens=tokens)).decode()
    return Grammar("parts", source, grammar.param, left_open=tuple(grammar.param + path for path in found.left_open))


def _any_arguments(plain: PlainCalls) -> PlainCalls:
    return PlainCalls({name: {"type": "object"} for name in plain.arguments}, None, ())


def _calls(form: CallFormat, plain: PlainCalls) -> list[CallParts] | None:
    """Return each tool's call; None if the format cannot be a grammar."""
    calls = [call_parts(form, name, arguments) for name, arguments in plain.arguments.items()]
    written = [call for call in calls if call is not None]
    return written if len(written) == len(calls) else None


def _answer(
    form: CallFormat,
    calls: Sequence[CallParts],
    answer: dict[str, Any] | None,
    control_tokens: Mapping[str, int],
    *,
    may_repeat: bool,
) -> AnswerParts:
    before, between, after = surroundings(form)
    tokens = {marker: control_tokens[marker] for marker in form.markers if marker in control_tokens}
    return AnswerParts([call.parts for call in calls], before, between if may_repeat else None, after, answer, tokens)


def _source(schema: dict[str, Any], reach: Reach) -> str:
    if reach.is_portable:
        check_portable(schema)
    return msgspec.json.encode(schema).decode()


def _asked(asked: SchemasAsked) -> str:
    return msgspec.json.encode(asked).decode()
