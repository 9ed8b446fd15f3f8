"""All constraints on one part of an answer, gathered from a schema, its `$ref`s and its `allOf`s."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec

from tailrace.schemas.references import Schema, pointer

__all__ = ["CHOICES", "KINDS", "Clause", "Clauses", "Conjunction", "Never", "SchemaError", "is_kind", "key_of"]

KINDS = ("object", "array", "string", "number", "integer", "boolean", "null")
CHOICES = ("anyOf", "oneOf")
_ANNOTATIONS = frozenset(
    {"$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "contentEncoding", "contentMediaType",
     "contentSchema", "default", "definitions", "deprecated", "description", "example", "examples", "id", "readOnly",
     "strict", "title", "writeOnly"}
)  # fmt: skip
_IN_PLACE = frozenset({"$ref", "allOf", *CHOICES})
_LEFT_OPEN = frozenset(  # keywords that no grammar keeps
    {"$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
     "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems"}
)  # fmt: skip
_LOW = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_HIGH = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_COUNTS = frozenset(_LOW[2:] + _HIGH[2:])
_FAMILIES = {  # keywords that say something about one kind of values only
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}


class Never(Exception):
    """No value conforms to the schema."""


class SchemaError(ValueError):
    """It is no JSON schema, or a limit is exceeded. The message is the reason."""


class Clause(NamedTuple):
    """A schema of the client and its path."""

    schema: Schema
    path: str


Clauses: TypeAlias = tuple[Clause, ...]  # a value has to conform to all of them


@dataclass(slots=True)
class Conjunction:
    """The constraints of some parts, which have no `$ref` and no `allOf` any more. None: no constraint."""

    kinds: frozenset[str] | None = None
    values: list[Any] | None = None  # of enum and const
    limits: dict[str, float] = field(default_factory=dict)  # by keyword
    paths: dict[str, str] = field(default_factory=dict)  # of keywords that are kept once
    pattern: str | None = None
    format: str | None = None
    multiple: float | None = None
    properties: dict[str, Clauses] = field(default_factory=dict)
    required: list[str] = field(default_factory=list)
    additional: Clauses | None = None
    patterns: dict[str, Clauses] = field(default_factory=dict)
    prefix: list[Clauses] = field(default_factory=list)
    items: Clauses | None = None
    choices: list[Clauses] = field(default_factory=list)  # one of each
    exclusive: list[tuple[int, str]] = field(default_factory=list)  # choices of a oneOf, with their path
    base: list[Clause] = field(default_factory=list)  # the parts without their choices
    left_open: list[str] = field(default_factory=list)  # paths of keywords that are not kept

    @staticmethod
    def is_constrained(schema: Schema, *, but: str) -> bool:
        """Return whether a schema has a keyword that may restrict a value, beside this one."""
        return any(name != but and name not in _ANNOTATIONS for name in schema)

    def add(self, part: Clause) -> None:
        """Add the keywords of a part. Raises: Never, SchemaError."""
        schema, path = part
        if schema is False:
            raise Never
        if schema is True:
            return
        if not isinstance(schema, dict):
            raise SchemaError(f"{path}: a schema must be an object")
        own = {name: value for name, value in schema.items() if name not in _IN_PLACE and name not in _ANNOTATIONS}
        if own:
            self.base.append(Clause(own, path))
        for name in own:
            if name in _LEFT_OPEN or name not in _KNOWN:
                self._leave_open(path, name)
        self._add_kinds(schema, path)
        self._add_scalars(schema, path)
        self._add_object(schema, path)
        self._add_array(schema, path)
        for name in CHOICES:
            if name in schema:
                if name == "oneOf":
                    self.exclusive.append((len(self.choices), pointer(path, name)))
                self.choices.append(_list_of(schema[name], pointer(path, name)))

    def _leave_open(self, path: str, name: str) -> None:
        self.left_open.append(pointer(path, name))

    def _add_kinds(self, schema: Schema, path: str) -> None:
        given = schema.get("type")
        if given is not None:
            names = given if isinstance(given, list) else [given]
            if not names or not all(isinstance(name, str) and name in KINDS for name in names):
                raise SchemaError(f"{pointer(path, 'type')} must be {', '.join(KINDS[:-1])} or {KINDS[-1]}")
            kinds = frozenset(names) | (frozenset({"null"}) if schema.get("nullable") is True else frozenset())
        elif "enum" in schema or "const" in schema:
            kinds = None
        else:
            found = [kind for kind, names in _FAMILIES.items() if any(name in schema for name in names)]
            kinds = frozenset(found) or None
        if kinds is not None:
            self.kinds = kinds if self.kinds is None else _both(self.kinds, kinds)
            if not self.kinds:
                raise Never
        if "enum" in schema or "const" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            if not isinstance(values, list) or not values:
                raise SchemaError(f"{pointer(path, 'enum')} must be a list of values")
            if schema.get("nullable") is True and None not in values:
                values = [*values, None]
            if self.values is not None:
                known = {key_of(one) for one in values}
                values = [one for one in self.values if key_of(one) in known]
            self.values = list(values)

    def _add_scalars(self, schema: Schema, path: str) -> None:
        for name in (*_LOW, *_HIGH):
            if name not in schema:
                continue
            value = schema[name]
            if isinstance(value, bool) and name.startswith("exclusive"):  # of draft 4, beside minimum or maximum
                beside = "minimum" if name == "exclusiveMinimum" else "maximum"
                if value and isinstance(schema.get(beside), int | float):
                    self._limit(name, schema[beside], path)
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise SchemaError(f"{pointer(path, name)} must be a number")
            if name in _COUNTS and (value < 0 or int(value) != value):
                raise SchemaError(f"{pointer(path, name)} must be a whole number that is not negative")
            self._limit(name, value, path)
        multiple = schema.get("multipleOf")
        if multiple is not None:
            if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not multiple > 0:
                raise SchemaError(f"{pointer(path, 'multipleOf')} must be a positive number")
            self._once("multiple", "multipleOf", multiple, path)
        for name in ("pattern", "format"):
            if name in schema:
                if not isinstance(schema[name], str):
                    raise SchemaError(f"{pointer(path, name)} must be a text")
                self._once(name, name, schema[name], path)

    def _limit(self, name: str, value: float, path: str) -> None:
        known = self.limits.get(name)
        self.limits[name] = value if known is None else (max if name in _LOW else min)(known, value)
        if self.limits[name] == value:
            self.paths[name] = path

    def _once(self, attribute: str, name: str, value: object, path: str) -> None:
        """Keep the first of several different values."""
        known = getattr(self, attribute)
        if known is None:
            setattr(self, attribute, value)
            self.paths[name] = path
        elif known != value:
            self._leave_open(path, name)

    def _add_object(self, schema: Schema, path: str) -> None:
        properties = _map_of(schema.get("properties"), pointer(path, "properties"))
        patterns = _map_of(schema.get("patternProperties"), pointer(path, "patternProperties"))
        name = "additionalProperties" if "additionalProperties" in schema else "unevaluatedProperties"
        further = (Clause(schema[name], pointer(path, name)),) if schema.get(name) not in (None, True) else None
        if name == "unevaluatedProperties" and schema.get(name) is False and (set(schema) & {*_IN_PLACE, "if"}):
            further = None  # objects with named properties are closed anyway
        mine, theirs = self.properties, properties
        merged = {one: mine.get(one, self._beside(one)) + theirs.get(one, _beside(patterns, further)) for one in
                  dict.fromkeys((*mine, *theirs))}  # fmt: skip
        self.properties = merged
        for one, parts in patterns.items():
            self.patterns[one] = self.patterns.get(one, ()) + parts
        if further is not None:
            self.additional = (self.additional or ()) + further
        required = schema.get("required")
        if required is not None and not isinstance(required, bool):  # a boolean is of draft 3
            if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
                raise SchemaError(f"{pointer(path, 'required')} must be a list of names")
            self.required = list(dict.fromkeys((*self.required, *required)))

    def _beside(self, name: str) -> Clauses:
        """Return what a property has to be that is not among those so far."""
        return _beside(self.patterns, self.additional)

    def _add_array(self, schema: Schema, path: str) -> None:
        items, first = schema.get("items"), schema.get("prefixItems")
        if isinstance(items, list):  # of drafts before 2020-12
            first, items, name = items, schema.get("additionalItems"), "additionalItems"
            where = pointer(path, "items")
        else:
            name, where = "items", pointer(path, "prefixItems")
        prefix = [(one,) for one in _list_of(first, where)] if first is not None else []
        further = (Clause(items, pointer(path, name)),) if items not in (None, True) else None
        num_both = max(len(self.prefix), len(prefix))
        self.prefix = [_at(self.prefix, self.items, i) + _at(prefix, further, i) for i in range(num_both)]
        if further is not None:
            self.items = (self.items or ()) + further

    def finish(self) -> None:
        """Filter the values by the other constraints, which are then fulfilled. Raises: Never."""
        if self.values is not None:
            kinds, limits = self.kinds, self.limits
            self.values = [
                one for one in self.values if (kinds is None or is_kind(one, kinds)) and _is_within(one, limits)
            ]
            if not self.values:
                raise Never


_KNOWN = _ANNOTATIONS | _IN_PLACE | _LEFT_OPEN | {
    "additionalItems", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems",
    "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf",
    "nullable", "pattern", "patternProperties", "prefixItems", "properties", "required", "type",
    "unevaluatedProperties", "additionalProperties",
}  # fmt: skip


def _both(some: frozenset[str], others: frozenset[str]) -> frozenset[str]:
    both = some & others
    if ("integer" in some and "number" in others) or ("integer" in others and "number" in some):
        both |= {"integer"}
    return both - {"integer"} if "number" in both else both


def _beside(patterns: dict[str, Clauses], further: Clauses | None) -> Clauses:
    return () if patterns else further or ()


def _at(prefix: Sequence[Clauses], further: Clauses | None, index: int) -> Clauses:
    return prefix[index] if index < len(prefix) else further or ()


def _list_of(value: object, path: str) -> Clauses:
    if not isinstance(value, list) or not value:
        raise SchemaError(f"{path} must be a list of schemas")
    return tuple(Clause(one, pointer(path, index)) for index, one in enumerate(value))


def _map_of(value: object, path: str) -> dict[str, Clauses]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise SchemaError(f"{path} must be an object")
    return {name: (Clause(one, pointer(path, name)),) for name, one in value.items()}


def key_of(value: object) -> bytes:
    """Return the same key for equal JSON values."""
    return msgspec.json.encode(value, order="sorted")


def is_kind(value: object, kinds: frozenset[str]) -> bool:
    """Return whether a JSON value is of one of these types."""
    if isinstance(value, bool) or value is None:
        return ("null" if value is None else "boolean") in kinds
    if isinstance(value, int | float):
        return "number" in kinds or ("integer" in kinds and int(value) == value)
    return ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object") in kinds


def _is_within(value: object, limits: dict[str, float]) -> bool:
    if isinstance(value, str):
        return limits.get("minLength", 0) <= len(value) <= limits.get("maxLength", math.inf)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    return limits.get("minimum", -math.inf) <= value <= limits.get("maximum", math.inf) and limits.get(
        "exclusiveMinimum", -math.inf
    ) < value < limits.get("exclusiveMaximum", math.inf)
