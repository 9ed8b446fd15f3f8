"""Converts grammars to the EBNF of xgrammar, which is part of OpenVINO GenAI.

The library also accepts JSON schemas and regular expressions. But it allows unlimited white space in JSON, in which
small models get stuck, and regular expressions can take unbounded time (see `automata`). So both are converted to
unambiguous rules here.

JSON may have at most one space after `:` and `,` and no other white space. Objects have the named properties in their
order, then those that `additionalProperties` allows. Numbers have at most 18 digits before the point and 16 after it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import msgspec

from tailrace.engines.grammars.automata import NO_ANSWER, Automaton, GrammarError, Ranges, of_choices, of_regex
from tailrace.engines.grammars.integers import pattern_between
from tailrace.types import Grammar

__all__ = ["Rules", "to_rules"]

_Schema: TypeAlias = Any  # JSON: an object or a boolean

_NUMBER = r"-?(0|[1-9]\d{0,17})(\.\d{1,16})?([eE][+-]?\d{1,2})?"
_MOST = 10**18 - 1
_DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": r"[A-Za-z0-9_+\-]+(\.[A-Za-z0-9_+\-]+)*@([A-Za-z0-9]+\.)+[A-Za-z]{2,8}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": "([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
}
_OF_TYPE = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": ("minimum", "maximum"),
}
_TYPES = ("object", "array", "string", "number", "boolean", "null")  # an integer is a number

_SPACE = '" "?'
_ESCAPED = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}  # in JSON
_PLAIN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF))  # allowed unescaped in a string
_ESCAPE = r'"\\" (["\\/bfnrt] | "u" ([0-9a-cefA-CEF] [0-9a-fA-F] | [dD] [0-7]) [0-9a-fA-F] [0-9a-fA-F])'


class Rules(NamedTuple):
    """A grammar as the library takes it, and its automata, whose size decides how long the library compiles it."""

    text: str
    automata: tuple[Automaton, ...]


@lru_cache(maxsize=64)
def to_rules(grammar: Grammar) -> Rules:
    """Convert a grammar. Raises: GrammarError if it is too large, unsatisfiable or uses an unsupported feature."""
    rules = _Rules()
    if grammar.kind == "regex":
        rules.automaton("root", of_regex(grammar.source))
    else:
        _SchemaRules(rules, msgspec.json.decode(grammar.source)).write()
    return Rules(rules.text(), tuple(rules.automata))


class _Rules:
    def __init__(self) -> None:
        self.automata: list[Automaton] = []
        self._bodies: dict[str, str] = {}
        self._num_names = 0

    def name(self) -> str:
        self._num_names += 1
        return f"r{self._num_names}"

    def add(self, body: str, name: str = "") -> str:
        name = name or self.name()
        self._bodies[name] = body
        return name

    def text(self) -> str:
        root = self._bodies.pop("root")
        return "".join(f"{name} ::= {body}\n" for name, body in [("root", root), *self._bodies.items()])

    def automaton(self, name: str, automaton: Automaton, *, in_json: bool = False) -> str:
        """Add a rule for each state with a choice. Each alternative ends with the next state's rule, so that the parser
        needs one state at a time. With `in_json`, the text is inside a JSON string and includes its closing quote."""
        self.automata.append(automaton)
        entered = [0] * len(automaton.moves)
        for moves in automaton.moves:
            for _, target in moves:
                entered[target] += 1
        names = {0: name}
        waiting = [0]
        end = '"\\""' if in_json else '""'

        def follow(state: int) -> str:
            """Return the expression for a state: the texts of a chain without choices, then the name of a rule."""
            parts = []
            while not automaton.accepting[state] and entered[state] == 1 and len(automaton.moves[state]) == 1:
                ((ranges, target),) = automaton.moves[state]
                pieces = _pieces(ranges, in_json=in_json)
                parts.append(pieces[0] if len(pieces) == 1 else f"({' | '.join(pieces)})")
                state = target
            if automaton.accepting[state] and not automaton.moves[state]:
                parts.append(end)
            else:
                if state not in names:
                    names[state] = self.name()
                    waiting.append(state)
                parts.append(names[state])
            return " ".join(parts)

        while waiting:
            state = waiting.pop()
            choices = [end] if automaton.accepting[state] else []
            for ranges, target in automaton.moves[state]:
                then = follow(target)
                choices += [f"{piece} {then}" for piece in _pieces(ranges, in_json=in_json)]
            self.add(" | ".join(choices), names[state])
        return name


def _pieces(ranges: Ranges, *, in_json: bool) -> list[str]:
    """Return terms of a rule that match one of these characters."""
    if not in_json:
        return [_class(ranges)]
    found = []
    plain: list[tuple[int, int]] = []
    for low, high in ranges:
        plain += [(max(low, first), min(high, last)) for first, last in _PLAIN if low <= last and first <= high]
        found += [_literal(text) for sign, text in _ESCAPED.items() if low <= ord(sign) <= high]
        for code in range(low, min(high, 0x1F) + 1):
            if chr(code) not in _ESCAPED:
                found.append(_literal(f"\\u{code:04x}"))
    return ([_class(plain)] if plain else []) + found


def _row(length: int) -> Automaton:
    """Return the automaton of so many characters in a string, nearly: without those that are written as escapes."""
    return Automaton([*([(_PLAIN, state + 1)] for state in range(length)), []], [False] * length + [True])


def _class(ranges: Sequence[tuple[int, int]]) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _literal(chr(ranges[0][0]))
    return f"[{''.join(_code(low) if low == high else f'{_code(low)}-{_code(high)}' for low, high in ranges)}]"


def _literal(text: str) -> str:
    return f'"{"".join(_code(ord(sign)) for sign in text)}"'


def _code(code: int) -> str:
    """Return a character as it is if that is safe in the library's language, else its code point."""
    if chr(code).isascii() and (chr(code).isalnum() or code == 0x20):
        return chr(code)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


class _SchemaRules:
    """Converts a JSON schema to rules. Equal schemas share one rule."""

    def __init__(self, rules: _Rules, root: _Schema) -> None:
        self._rules = rules
        self._root = root
        self._names: dict[str, str] = {}  # of the rules for schemas, by their JSON
        self._shared: dict[str, str] = {}

    def write(self) -> None:
        self._rules.add(self._rule(self._root), "root")

    def _rule(self, schema: _Schema) -> str:
        """Return the name of the rule for a schema."""
        if isinstance(schema, dict) and "$ref" in schema:
            _, kind, name = schema["$ref"].split("/", 2)
            return self._rule(self._root[kind][name])
        if schema is False:
            raise GrammarError(NO_ANSWER)
        key = json.dumps(schema, sort_keys=False)
        if key not in self._names:
            self._names[key] = name = self._rules.name()  # before the body, which may be recursive
            self._rules.add(self._body(schema), name)
        return self._names[key]

    def _body(self, schema: _Schema) -> str:
        if schema is True:
            schema = {}
        if "const" in schema:
            return self._texts([schema["const"]])
        if "enum" in schema:
            return self._texts(schema["enum"])
        if "anyOf" in schema:
            return " | ".join(dict.fromkeys(self._rule(one) for one in schema["anyOf"]))
        types = schema.get("type") or [
            kind for kind, names in _OF_TYPE.items() if any(name in schema for name in names)
        ]
        types = list(dict.fromkeys([types] if isinstance(types, str) else types or _TYPES))
        if "number" in types and "integer" in types:
            types.remove("integer")
        return " | ".join(getattr(self, f"_{kind}")(schema) for kind in types)

    def _texts(self, values: list[object]) -> str:
        texts = [json.dumps(value, ensure_ascii=False) for value in values]
        return self._rules.automaton(self._rules.name(), of_choices(texts))

    def _pattern(self, pattern: str, *, in_json: bool) -> str:
        key = f"{in_json} {pattern}"
        if key not in self._shared:
            self._shared[key] = self._rules.name()
            self._rules.automaton(self._shared[key], of_regex(pattern), in_json=in_json)
        return self._shared[key]

    def _null(self, schema: _Schema) -> str:
        return '"null"'

    def _boolean(self, schema: _Schema) -> str:
        return '"true" | "false"'

    def _number(self, schema: _Schema) -> str:
        return self._pattern(_NUMBER, in_json=False)

    def _integer(self, schema: _Schema) -> str:
        low, high = schema.get("minimum", -_MOST), schema.get("maximum", _MOST)
        return self._pattern(pattern_between(low, high), in_json=False)

    def _string(self, schema: _Schema) -> str:
        if "pattern" in schema:
            return '"\\"" ' + self._pattern(schema["pattern"], in_json=True)
        if "format" in schema:
            return '"\\"" ' + self._pattern(_FORMATS[schema["format"]], in_json=True)
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        then = self._any_characters() if most is None else '"\\""'
        self._rules.automata.append(_row(least if most is None else most))
        for left in range((least if most is None else most) - 1, -1, -1):
            optional = ' | "\\""' if left >= least else ""
            then = self._rules.add(f"{_class(_PLAIN)} {then} | {_ESCAPE} {then}{optional}")
        return f'"\\"" {then}'

    def _any_characters(self) -> str:
        if "characters" not in self._shared:
            name = self._shared["characters"] = self._rules.name()
            self._rules.automata.append(Automaton([[(_PLAIN, 0)]], [True]))
            self._rules.add(f'{_class(_PLAIN)} {name} | {_ESCAPE} {name} | "\\""', name)
        return self._shared["characters"]

    def _array(self, schema: _Schema) -> str:
        places = [self._rule(one) for one in schema.get("prefixItems", [])]
        items = schema.get("items", not places)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if items is False:
            most = len(places) if most is None else min(most, len(places))
        if most is not None and most < least:
            raise GrammarError(NO_ANSWER)
        if most == 0:
            return '"[]"'
        item = self._rule(items) if items is not False else ""
        num_counted = max(least, len(places)) if most is None else most
        then = ""  # what follows an item
        if most is None:
            then = self._rules.name()
            self._rules.add(f'"," {_SPACE} {item} {then} | "]"', then)
        else:
            then = '"]"'
        for number in range(num_counted - 1, 0, -1):
            at = places[number] if number < len(places) else item
            then = self._rules.add(f'"," {_SPACE} {at} {then}' + (' | "]"' if number >= least else ""))
        first = places[0] if places else item
        return f'"[" {first} {then}' + (' | "[]"' if not least else "")

    def _object(self, schema: _Schema) -> str:
        named = dict(schema.get("properties", {}))
        further = schema.get("additionalProperties", "properties" not in schema)
        required = set(schema.get("required", []))
        if required - named.keys():
            if further is False:
                raise GrammarError(NO_ANSWER)
            named |= {name: further for name in schema["required"] if name not in named}
        more = self._rules.name() if further is not False else ""
        pair = f'"\\"" {self._any_characters()} ":" {_SPACE} {self._rule(further)}' if more else ""
        behind = '"}"'  # what may follow a property
        if more:
            self._rules.add(f'"," {_SPACE} {pair} {more} | "}}"', more)
            behind = more
        first = [f"{pair} {more}"] if more else []  # what may follow the opening brace
        first.append('"}"')
        for name, value in reversed(named.items()):
            text = _literal(json.dumps(name, ensure_ascii=False) + ":")
            member = f"{text} {_SPACE} {self._rule(value)} {behind}"
            first = [member] if name in required else [member, *first]
            behind = self._rules.add(f'"," {_SPACE} {member}' + ("" if name in required else f" | {behind}"))
        return f'"{{" ({" | ".join(first)})'
