"""Puts a JSON schema into plain form: what the grammars of an engine keep of it, with few keywords.

In plain form a schema has one of `$ref`, `anyOf`, `const`, `enum`, or the keywords of its types. Every `$ref` leads to
`$defs`, and a schema with `anyOf` has nothing beside it. So:

- a `$ref` to anywhere in the schema is found, also beside other keywords. A schema that contains itself stays so;
- `allOf`, and what stands beside a `$ref`, are merged;
- `oneOf` becomes `anyOf`. If several of its schemas may fit one value, this is named;
- annotations have no effect. Unknown keywords are named;
- what the grammar does not keep (`Reach`) is left open, and named. The whole answer is checked against the schema.

Where a schema does not name a type, its keywords decide it: one with `properties` is an object. So the plain form may
be narrower than the schema, and its answers still conform. Names are JSON pointers into the schema.

The work is limited, because a small schema may expand to a very large one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import combinations, product
from typing import Any, NamedTuple

from tailrace.schemas.conjunction import CHOICES, KINDS, Clause, Clauses, Conjunction, Never, SchemaError, key_of
from tailrace.schemas.disjoint import exclude, kind_of
from tailrace.schemas.reach import Reach
from tailrace.schemas.references import References, Schema, pointer
from tailrace.schemas.regexes import regex_fault

__all__ = ["MAX_STEPS", "NO_ANSWER", "Plain", "plain_form"]

MAX_STEPS = 40_000  # about the number of schemas that are visited
_SIZE_OF_STEP = 10  # entries of lists and objects, and characters
_MAX_DEPTH = 48
_MAX_ALTERNATIVES = 256  # of one anyOf, after merging
_MAX_COMPARED = 32  # alternatives of a oneOf that are compared with each other
NO_ANSWER = "no answer could conform to it"


class Plain(NamedTuple):
    """A schema in plain form, and the paths of what it leaves open."""

    schema: dict[str, Any]
    left_open: tuple[str, ...]


def plain_form(schema: Schema, reach: Reach, *, kind: str = "", prefix: str = "") -> Plain:
    """Put a schema into plain form. Takes up to a second. `kind` is a type that the value must have. `prefix` begins
    the names of `$defs`. Raises: SchemaError."""
    if not isinstance(schema, dict):
        raise SchemaError("it must be an object")
    return _Converter(schema, reach, prefix).convert(kind)


class _Converter:
    def __init__(self, root: Schema, reach: Reach, prefix: str) -> None:
        self._references = References(root)
        self._root = root
        self._prefix = prefix
        self._reach = reach
        self._steps = 0
        self._left_open: dict[str, None] = {}
        self._names: dict[str, str] = {}  # of definitions, by the paths of their schemas
        self._paths: dict[str, str] = {}  # and the paths, by these names
        self._definitions: dict[str, Any] = {}
        self._waiting: deque[Clause] = deque()  # definitions to convert
        self._impossible: set[str] = set()  # paths of definitions to which no value conforms

    def convert(self, kind: str) -> Plain:
        given = (Clause({"type": kind}, "#"),) if kind else ()
        num_impossible = -1
        while num_impossible < len(self._impossible):  # again without those that were found
            num_impossible = len(self._impossible)
            for known in (self._left_open, self._names, self._paths, self._definitions):
                known.clear()
            try:
                schema = self._plain((Clause(self._root, "#"), *given), 0)
            except Never:
                raise SchemaError(NO_ANSWER) from None
            while self._waiting:
                clause = self._waiting.popleft()
                try:
                    self._definitions[self._names[clause.path]] = self._plain((clause,), 0)
                except Never:
                    self._impossible.add(clause.path)
        if self._definitions:
            schema = {**schema, "$defs": self._definitions}
        return Plain(schema, tuple(self._left_open))

    def _plain(self, parts: Clauses, depth: int) -> dict[str, Any]:
        """Return the plain form of a conjunction. Raises: Never, SchemaError."""
        if depth > _MAX_DEPTH:
            self._leave_open(parts[0].path if parts else "#")
            return {}
        if (target := self._pure_reference(parts)) is not None:
            if target.path in self._impossible:
                raise Never
            return {"$ref": f"#/$defs/{self._name(target)}"}
        found = self._gather(parts)
        for path in found.left_open:
            self._leave_open(path)
        found.finish()
        if found.choices:
            return self._alternatives(found, depth)
        if found.values is not None:
            return self._values(found)
        return self._by_kind(found, depth)

    # References

    def _pure_reference(self, parts: Clauses) -> Clause | None:
        """Return the target of a schema that is nothing but a `$ref` within this schema."""
        seen = set[str]()
        target: Clause | None = None
        while len(parts) == 1 and isinstance(schema := parts[0].schema, dict) and "$ref" in schema:
            self._step(_cost(schema))
            if Conjunction.is_constrained(schema, but="$ref") or parts[0].path in seen:
                break
            seen.add(parts[0].path)
            found = self._references.find(schema["$ref"])
            if found is None:
                return None
            target = Clause(*found)
            parts = (target,)
        if target is None or isinstance(target.schema, bool):
            return None
        return target

    def _name(self, target: Clause) -> str:
        if target.path not in self._names:
            name = self._names[target.path] = f"{self._prefix}d{len(self._names)}"
            self._paths[name] = target.path
            self._waiting.append(target)
        return self._names[target.path]

    def _gather(self, parts: Clauses) -> Conjunction:
        """Follow all `$ref` and `allOf`. Raises: Never, SchemaError."""
        found, seen, waiting = Conjunction(), set[str](), deque(parts)
        while waiting:
            part = waiting.popleft()
            self._step(_cost(part.schema))
            found.add(part)
            if not isinstance(part.schema, dict):
                continue
            nested = part.schema.get("allOf")
            if nested is not None:
                if not isinstance(nested, list) or not nested:
                    raise SchemaError(f"{pointer(part.path, 'allOf')} must be a list of schemas")
                waiting.extendleft(
                    Clause(one, pointer(part.path, "allOf", index)) for index, one in reversed([*enumerate(nested)])
                )
            if "$ref" in part.schema:
                target = self._references.find(part.schema["$ref"])
                if target is None:
                    self._leave_open(pointer(part.path, "$ref"))
                elif target[1] not in seen:  # otherwise it contains itself, which adds no constraint
                    seen.add(target[1])
                    waiting.appendleft(Clause(*target))
        return found

    # Choices

    def _alternatives(self, found: Conjunction, depth: int) -> dict[str, Any]:
        groups: list[Clauses] = []
        total = 1
        for group in found.choices:
            if total * len(group) > _MAX_ALTERNATIVES:
                self._leave_open(group[0].path.rpartition("/")[0])
                continue
            total *= len(group)
            groups.append(group)
        base = tuple(found.base)
        if not groups:
            return self._plain(base, depth + 1)
        distinct: dict[bytes, dict[str, Any]] = {}
        for chosen in product(*groups):
            try:
                one = self._plain(base + chosen, depth + 1)
            except Never:
                continue
            distinct |= {key_of(each): each for each in one.get("anyOf", [one])}
        if not distinct:
            raise Never
        schemas = list(distinct.values())
        for index, path in found.exclusive:
            if found.choices[index] in groups and not (len(groups) == 1 and self._are_disjoint(schemas)):
                self._leave_open(path)
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}

    def _are_disjoint(self, schemas: list[dict[str, Any]]) -> bool:
        """Return whether no value fits two of these plain schemas, as far as this is easy to see."""
        if len(schemas) > _MAX_COMPARED:
            return False
        self._step(len(schemas) ** 2 // _SIZE_OF_STEP)
        return all(exclude(one, other) for one, other in combinations(map(self._resolved, schemas), 2))

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the types and the properties of the target of a plain `$ref`."""
        if "$ref" not in schema:
            return schema
        target = self._references.find(self._paths[schema["$ref"].rpartition("/")[2]])
        found = target[0] if target is not None else {}
        return found if isinstance(found, dict) and not {"$ref", "allOf", *CHOICES} & found.keys() else {}

    # Values

    def _values(self, found: Conjunction) -> dict[str, Any]:
        values = found.values or []
        kept = [one for one in values if self._reach.has_values or not isinstance(one, list | dict)]
        kept = list({key_of(one): one for one in kept}.values())
        if not kept or len(kept) > self._reach.max_values:
            self._leave_open(_where(found, "enum"))
            kinds = {kind_of(one) for one in values}
            return {"type": _type(kinds)}
        return {"const": kept[0]} if len(kept) == 1 else {"enum": kept}

    def _by_kind(self, found: Conjunction, depth: int) -> dict[str, Any]:
        if found.kinds is None:
            return {}
        schema: dict[str, Any] = {"type": _type(found.kinds)}
        makers: dict[str, Callable[[Conjunction, int], dict[str, Any]]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": self._number,
            "integer": self._number,
        }
        possible = []
        for kind in KINDS:
            if kind in found.kinds:
                try:
                    schema |= makers[kind](found, depth) if kind in makers else {}
                except Never:
                    continue
                possible.append(kind)
        if not possible:
            raise Never
        return schema | {"type": _type(possible)}

    def _number(self, found: Conjunction, depth: int) -> dict[str, Any]:
        is_integer = "number" not in (found.kinds or ())
        limits, schema = dict(found.limits), dict[str, Any]()
        if is_integer:
            for exclusive, name, by in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
                if exclusive in limits:
                    edge = limits.pop(exclusive)
                    within = math.floor(edge) + 1 if by > 0 else math.ceil(edge) - 1
                    inner = limits.get(name, within)
                    limits[name] = max(inner, within) if by > 0 else min(inner, within)
                    found.paths.setdefault(name, found.paths[exclusive])
            if "minimum" in limits:
                limits["minimum"] = math.ceil(limits["minimum"])
            if "maximum" in limits:
                limits["maximum"] = math.floor(limits["maximum"])
        low = max(limits.get("minimum", -math.inf), limits.get("exclusiveMinimum", -math.inf))
        high = min(limits.get("maximum", math.inf), limits.get("exclusiveMaximum", math.inf))
        if low > high:
            raise Never
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if name in limits:
                is_kept = abs(limits[name]) <= self._reach.max_number and (is_integer or self._reach.has_fractions)
                if is_kept and (is_integer or found.kinds == frozenset({"number"})):
                    schema[name] = limits[name]
                else:
                    self._leave_open(_where(found, name))
        if found.multiple is not None:
            if self._reach.has_fractions:
                schema["multipleOf"] = found.multiple
            else:
                self._leave_open(_where(found, "multipleOf"))
        return schema

    def _string(self, found: Conjunction, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        if found.format is not None:
            if found.format in self._reach.formats and (found.pattern is None or self._reach.has_sized_texts):
                schema["format"] = found.format
            else:
                self._leave_open(_where(found, "format"))
        if found.pattern is not None:
            if self._reach.has_patterns and self._keeps_pattern(found.pattern):
                schema["pattern"] = found.pattern
            else:
                self._leave_open(_where(found, "pattern"))
        self._counts(found, schema, "minLength", "maxLength", self._reach.max_length, not schema)
        return schema

    def _keeps_pattern(self, pattern: str) -> bool:
        return not self._reach.is_portable or not regex_fault(pattern)

    def _counts(
        self, found: Conjunction, schema: dict[str, Any], low: str, high: str, most: int, is_alone: bool = True
    ) -> None:
        """Add a smallest and a largest size. Raises: Never."""
        if found.limits.get(low, 0) > found.limits.get(high, math.inf):
            raise Never
        for name in (low, high):
            if name not in found.limits or (name == low and not found.limits[name]):
                continue
            if found.limits[name] <= most and (is_alone or self._reach.has_sized_texts):
                schema[name] = int(found.limits[name])
            else:
                self._leave_open(_where(found, name))

    # Lists and objects

    def _array(self, found: Conjunction, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        self._counts(found, schema, "minItems", "maxItems", self._reach.max_items)
        least = schema.get("minItems", 0)
        prefix: list[dict[str, Any]] = []
        is_open = True
        for parts in found.prefix:
            try:
                prefix.append(self._plain(parts, depth + 1))
            except Never:
                is_open = False
                break
        if prefix:
            schema["prefixItems"] = prefix
        if found.items is not None and is_open:
            try:
                schema["items"] = self._plain(found.items, depth + 1)
            except Never:
                is_open = False
        if not is_open:
            schema["items"] = False
            if least > len(prefix):
                raise Never
            if not prefix:
                del schema["items"]
                schema["maxItems"] = 0
        return schema

    def _object(self, found: Conjunction, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        properties: dict[str, Any] = {}
        for name, parts in found.properties.items():
            try:
                properties[name] = self._plain(parts, depth + 1)
            except Never:
                if name in found.required:
                    raise
        further = self._further(found, depth)
        for name in found.required:
            if name not in properties:
                if further is False and not found.patterns:
                    raise Never
                properties[name] = further if further not in (None, False) else {}
        if properties:
            schema["properties"] = properties
        if found.required:
            schema["required"] = list(found.required)
        if further is not None:
            schema["additionalProperties"] = further
        for name in ("minProperties", "maxProperties"):
            if name in found.limits and (name == "maxProperties" or found.limits[name] > len(found.required)):
                self._leave_open(_where(found, name))
        return schema

    def _further(self, found: Conjunction, depth: int) -> dict[str, Any] | bool | None:
        """Return the schema of properties without a name: False for none, None if it is not given. Properties whose
        names are patterns may have any name."""
        try:
            further = self._plain(found.additional, depth + 1) if found.additional is not None else None
        except Never:
            further = None
            is_closed = True
        else:
            is_closed = False
        if not found.patterns:
            return False if is_closed else further
        schemas: list[dict[str, Any]] = [further] if further is not None else []
        for name, parts in found.patterns.items():
            self._leave_open(pointer(parts[0].path.rpartition("/")[0], name))
            try:
                one = self._plain(parts, depth + 1)
            except Never:
                continue
            schemas += [one] if one not in schemas else []
        if not schemas:
            return False if is_closed else None
        if not is_closed and further is None:
            return {}
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}

    def _leave_open(self, path: str) -> None:
        self._left_open.setdefault(path)

    def _step(self, cost: int) -> None:
        self._steps += cost
        if self._steps > MAX_STEPS:
            raise SchemaError("it is too large when its references are expanded")


def _where(found: Conjunction, name: str) -> str:
    path = found.paths.get(name) or (found.base[0].path if found.base else "#")
    return pointer(path, name)


def _type(kinds: Any) -> str | list[str]:
    names = [kind for kind in KINDS if kind in kinds]
    if "number" in names and "integer" in names:
        names.remove("integer")
    return names[0] if len(names) == 1 else names


def _cost(schema: Schema) -> int:
    """Return how much work a schema is, without those inside of it."""
    if not isinstance(schema, dict):
        return 1
    sizes = (len(value) for value in schema.values() if isinstance(value, list | dict | str))
    return 1 + sum(sizes) // _SIZE_OF_STEP
