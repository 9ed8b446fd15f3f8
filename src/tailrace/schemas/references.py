"""Finds the targets of `$ref` in a JSON schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias
from urllib.parse import unquote

__all__ = ["References", "Schema", "pointer"]

Schema: TypeAlias = Any  # JSON: an object or a boolean, if the client made no mistake


def pointer(path: str, *names: object) -> str:
    """Return the path of a value below a path, as a JSON pointer (RFC 6901)."""
    return "".join([path, *("/" + str(name).replace("~", "~0").replace("/", "~1") for name in names)])


class References:
    """The targets in one schema. Those of other documents are never fetched."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._anchors: dict[str, tuple[Schema, str]] | None = None

    def find(self, reference: object) -> tuple[Schema, str] | None:
        """Return the target and its path; None if it is not in this schema."""
        if not isinstance(reference, str):
            return None
        base, _, fragment = reference.partition("#")
        if base and base != self._root.get("$id", self._root.get("id")):
            return self._named().get(base) if not fragment else None
        if not fragment:
            return self._root, "#"
        if not fragment.startswith("/"):
            return self._named().get("#" + fragment)
        found, path = self._root, "#"
        for step in unquote(fragment).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                return None
            path = pointer(path, name)
        return (found, path) if isinstance(found, dict | bool) else None

    def _named(self) -> dict[str, tuple[Schema, str]]:
        """Return the schemas that have a name of their own (`$anchor`, `$id`)."""
        if self._anchors is None:
            self._anchors = {}
            for schema, path in _objects(self._root):
                for keyword, mark in (("$anchor", "#"), ("$id", ""), ("id", "")):
                    name = schema.get(keyword)
                    if isinstance(name, str):
                        self._anchors.setdefault(mark + name, (schema, path))
        return self._anchors


def _objects(root: Schema) -> Iterator[tuple[Schema, str]]:
    waiting: list[tuple[Schema, str]] = [(root, "#")]
    while waiting:
        value, path = waiting.pop()
        if isinstance(value, dict):
            yield value, path
            waiting += [(inner, pointer(path, name)) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(inner, pointer(path, index)) for index, inner in enumerate(value)]
