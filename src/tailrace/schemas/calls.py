"""Answers that are tool calls: what a request asks for, and the schemas of it in plain form."""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace.schemas.conjunction import SchemaError
from tailrace.schemas.plain import plain_form
from tailrace.schemas.reach import Reach

__all__ = ["AskedCalls", "AskedTool", "PlainCalls", "plain_calls", "schema_of_call"]


class AskedTool(msgspec.Struct, frozen=True):
    """A tool that may be called. `where` is its path in the request. Without a schema, any object is its arguments."""

    name: str
    where: str
    schema: Any = None  # JSON


class AskedCalls(msgspec.Struct, frozen=True):
    """The source of a `Grammar` of the kind `calls`: an answer is calls of these tools, or conforms to the schema
    `answer`. `forced`: it is one call."""

    tools: list[AskedTool]
    answer: Any = None  # JSON
    answer_param: str = ""  # the field of the request with it
    forced: bool = False


class PlainCalls(msgspec.Struct, frozen=True):
    """Schemas in plain form: by the name of the tool, and of the answer. `left_open` are paths in the request."""

    arguments: dict[str, dict[str, Any]]
    answer: dict[str, Any] | None
    left_open: tuple[str, ...]


def plain_calls(asked: AskedCalls, reach: Reach) -> PlainCalls:
    """Put the schemas into plain form. Raises: SchemaError that names the tool."""
    arguments, left_open = dict[str, dict[str, Any]](), list[str]()
    for number, tool in enumerate(asked.tools):
        schema = {"type": "object"} if tool.schema is None else tool.schema
        try:
            plain = plain_form(schema, reach, kind="object", prefix=f"t{number}_")
        except SchemaError as error:
            raise SchemaError(f"{tool.where} ({tool.name}): {error}") from None
        arguments[tool.name] = plain.schema
        left_open += [tool.where + path for path in plain.left_open]
    if asked.answer is None or asked.forced:
        return PlainCalls(arguments, None, tuple(left_open))
    answer = plain_form(asked.answer, reach)
    return PlainCalls(arguments, answer.schema, (*(asked.answer_param + path for path in answer.left_open), *left_open))


def schema_of_call(calls: PlainCalls) -> dict[str, Any]:
    """Return the schema of one call as `{"name": …, "arguments": {…}}`."""
    definitions: dict[str, Any] = {}
    schemas = []
    for name, arguments in calls.arguments.items():
        definitions |= arguments.get("$defs", {})
        schemas.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "arguments": {key: value for key, value in arguments.items() if key != "$defs"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return schema | ({"$defs": definitions} if definitions else {})
