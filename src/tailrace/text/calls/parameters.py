"""Which parameters of a tool are text, by its JSON schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

__all__ = ["parameters_of"]

_Json: TypeAlias = Any  # Any: JSON from the client, not yet checked
_MAX_DEPTH = 8  # of references and alternatives


def parameters_of(tools: Iterable[Mapping[str, _Json]]) -> dict[str, dict[str, bool]]:
    """Return the parameters of tools in OpenAI's form, in order, and whether each of them is text. Parameters whose
    schema does not say so are left out."""
    found: dict[str, dict[str, bool]] = {}
    for tool in tools:
        function = tool["function"]
        root = function.get("parameters")
        properties = root.get("properties") if isinstance(root, dict) else None
        kinds = found[function["name"]] = {}
        if isinstance(properties, dict):
            for name, schema in properties.items():
                is_text = _is_text(schema, root, _MAX_DEPTH)
                if is_text is not None:
                    kinds[name] = is_text
    return found


def _is_text(schema: _Json, root: _Json, depth: int) -> bool | None:
    """Return whether a schema allows text; None if it allows anything."""
    if not isinstance(schema, dict) or not depth:
        return None
    kind = schema.get("type")
    if kind is not None:
        return kind == "string" or (isinstance(kind, list) and "string" in kind)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return any(isinstance(value, str) for value in values)
    if isinstance(schema.get("$ref"), str):
        return _is_text(_target(schema["$ref"], root), root, depth - 1)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            kinds = [_is_text(one, root, depth - 1) for one in schema[name]]
            return True if True in kinds else None if None in kinds or not kinds else False
    return None


def _target(reference: str, root: _Json) -> _Json:
    """Return the schema to which a reference like `#/$defs/name` leads; None if there is none."""
    node = root
    for name in reference.removeprefix("#/").split("/"):
        node = node.get(name) if isinstance(node, dict) else None
    return node
