"""Checks that an engine whose library is not known may get a schema in plain form: `PORTABLE`.

The limits are those of a library that compiled grammars within a step, so that all sequences waited, and crashed at a
property name with a quote and at an empty alternative.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tailrace.schemas.conjunction import SchemaError
from tailrace.schemas.references import pointer
from tailrace.schemas.regexes import MAX_SIZE, regex_fault, regex_size

__all__ = ["check_portable"]

_MAX_SCHEMAS = 100  # including nested ones
_MAX_VALUES = 200  # of all enums
_MAX_LENGTH = 48  # sum of maxLength or minLength of all strings
_MAX_CHARACTERS = 20_000  # of all names and values; ten times as many took 1.1 s
_MAX_DEPTH = 16


def check_portable(schema: dict[str, Any]) -> None:
    """Raises: SchemaError if not every engine may get this schema, which is in plain form."""
    _Check(schema).run()


class _Check:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._num_schemas = 0
        self._num_values = 0
        self._length = 0
        self._num_characters = 0
        self._size = 0
        self._finite: set[int] = set()  # ids of schemas that are known not to be infinite

    def run(self) -> None:
        self._check(self._root, "#", 0)
        if self._num_values > _MAX_VALUES or self._length > _MAX_LENGTH:
            raise SchemaError(
                f"it is too large: at most {_MAX_VALUES} values in enums, and {_MAX_LENGTH} "
                "characters in strings with a maxLength or minLength, together"
            )
        if self._num_characters > _MAX_CHARACTERS or self._size > MAX_SIZE:
            raise SchemaError(
                f"it is too large: at most {_MAX_CHARACTERS} characters in names and values, and {MAX_SIZE} in all "
                "patterns with their counts expanded"
            )

    def _check(self, schema: dict[str, Any] | bool, path: str, depth: int) -> None:
        if schema is False:  # a required part that cannot match crashes it
            raise SchemaError(f"{path}: no value could conform to it")
        if schema is True:
            return
        assert isinstance(schema, dict)
        self._num_schemas += 1
        if depth > _MAX_DEPTH or self._num_schemas > _MAX_SCHEMAS:
            raise SchemaError(f"it is too large: at most {_MAX_SCHEMAS} schemas, nested {_MAX_DEPTH} deep")
        self._length += max(schema.get("maxLength", 0), schema.get("minLength", 0))
        self._num_values += len(schema.get("enum", ()))
        if "pattern" in schema:
            if fault := regex_fault(schema["pattern"]):
                raise SchemaError(f"{path}/pattern: {fault}")
            self._size += regex_size(schema["pattern"])
        if "$ref" in schema and not self._is_valid_reference(schema["$ref"]):
            raise SchemaError(f"{path}: it contains itself without end")
        texts = (schema.get("properties", {}), schema.get("enum", ()), [schema.get("const")])
        self._num_characters += sum(len(text) for some in texts for text in some if isinstance(text, str))
        for name in schema.get("properties", {}):
            if re.search(r'["\\\x00-\x1f]', name):
                raise SchemaError(
                    f"{path}: the name of a property must not have quotes, backslashes or control characters"
                )
        num_items = len(schema.get("prefixItems", []))
        if num_items and not schema.get("minItems", 0) <= num_items <= schema.get("maxItems", num_items):
            raise SchemaError(f"{path}: minItems and maxItems do not allow the number of prefixItems")
        for subschema, where in _subschemas(schema, path):
            self._check(subschema, where, depth + 1)

    def _is_valid_reference(self, reference: str) -> bool:
        target = self._root.get("$defs", {}).get(reference.rpartition("/")[2])
        return isinstance(target, dict) and "$ref" not in target and not self._is_infinite(target, [])

    def _is_infinite(self, schema: dict[str, Any], above: list[int]) -> bool:
        """Return whether a schema contains itself through anyOf and $ref alone, and so never produces a character."""
        if id(schema) in above:
            return True
        if id(schema) in self._finite:  # without this check, the time would grow exponentially with nested anyOf
            return False
        if len(above) > _MAX_DEPTH:
            return True
        for choice in schema.get("anyOf", []):
            target = choice
            if "$ref" in choice:
                target = self._root.get("$defs", {}).get(choice["$ref"].rpartition("/")[2])
            if isinstance(target, dict) and self._is_infinite(target, [*above, id(schema)]):
                return True
        self._finite.add(id(schema))
        return False


def _subschemas(schema: dict[str, Any], path: str) -> Iterator[tuple[Any, str]]:
    for name in ("properties", "$defs"):
        for key, one in schema.get(name, {}).items():
            yield one, pointer(path, name, key)
    for name in ("anyOf", "prefixItems"):
        for index, one in enumerate(schema.get(name, [])):
            yield one, pointer(path, name, index)
    if "items" in schema and not ("prefixItems" in schema and schema["items"] is False):
        yield schema["items"], pointer(path, "items")
    if schema.get("additionalProperties", False) is not False:
        yield schema["additionalProperties"], pointer(path, "additionalProperties")
