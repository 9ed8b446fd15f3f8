"""Whether two schemas in plain form exclude each other, as far as this is easy to see."""

from __future__ import annotations

from typing import Any

__all__ = ["exclude", "kind_of"]


def kind_of(value: object) -> str:
    """Return the type of a JSON value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def exclude(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether no value fits both schemas."""
    kinds, others = _kinds(one), _kinds(other)
    if kinds is not None and others is not None:
        both = kinds & others
        if ("number" in kinds and "integer" in others) or ("integer" in kinds and "number" in others):
            both |= {"integer"}
        if not both:
            return True
        if both != {"object"}:
            some, more = _constants(one), _constants(other)
            return some is not None and more is not None and not any(value in more for value in some)
    required = set(one.get("required", ())) & set(other.get("required", ()))
    for name in required:
        mine, theirs = one.get("properties", {}).get(name), other.get("properties", {}).get(name)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            some, more = _constants(mine), _constants(theirs)
            if some is not None and more is not None and not any(value in more for value in some):
                return True
    return False


def _constants(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _kinds(schema: dict[str, Any]) -> set[str] | None:
    if (values := _constants(schema)) is not None:
        return {kind_of(one) for one in values}
    given = schema.get("type")
    return None if given is None else set(given) if isinstance(given, list) else {given}
