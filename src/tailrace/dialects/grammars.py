"""What an answer must look like, read from requests: JSON schemas and regular expressions, and only such as are safe.

An engine compiles a grammar inside a step that everybody waits for, and one that it cannot compile takes the engine
down (a name with a quote in it is enough, or a | with nothing beside it). So a schema may hold only the keywords below,
each of which is known to be honoured, and only so much of it.
These limits say what is read at all. How long an engine takes for what is within them depends on its library and on
the model's vocabulary, so it is tried before it comes there (`engines.grammars.check`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tailrace.dialects.bodies import JsonBody, to_json
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.types import Grammar

__all__ = [
    "ANY_OBJECT",
    "grammar_of_choice",
    "grammar_of_regex",
    "grammar_of_schema",
    "read_response_format",
    "read_tgi_grammar",
]

_MAX_SCHEMAS = 100  # schemas within a schema
_MAX_VALUES = 200  # of all enums
_MAX_LENGTH = 48  # of strings that are bounded, together; the trial for OpenVINO refuses many from 30 on
_MAX_CHARACTERS = 20_000  # of all names and values: ten times as many took 1.1 s
_MAX_ITEMS = 64
_MAX_DEPTH = 16
_MAX_TEXT = 2_000  # characters of a regular expression
_MAX_REPEATS = 64
_MAX_SIZE = 4_096  # of regular expressions, with their counts written out, together
_SET_SIZE = 64  # of what stands for many characters: .{128} took 2 s, (.{64}){64} 34 s, (a{64}){64} 0.1 s

_TYPES = frozenset({"object", "array", "string", "integer", "number", "boolean", "null"})
_FORMATS = frozenset({"date", "time", "date-time", "email", "uuid", "ipv4", "ipv6"})
_ANNOTATIONS = frozenset({"$schema", "$id", "title", "description", "default", "examples", "strict"})
_CHECKED = frozenset(
    {"$defs", "$ref", "additionalProperties", "anyOf", "const", "definitions", "enum", "format", "items", "maxItems",
     "maxLength", "maximum", "minItems", "minLength", "minimum", "pattern", "prefixItems", "properties", "required",
     "type"}
)  # fmt: skip
_KNOWN = frozenset(  # to JSON Schema; only these are named, so that nothing is repeated that a client made up
    {"additionalItems", "allOf", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else",
     "exclusiveMaximum", "exclusiveMinimum", "if", "maxContains", "maxProperties", "minContains", "minProperties",
     "multipleOf", "not", "nullable", "oneOf", "patternProperties", "propertyNames", "then", "unevaluatedItems",
     "unevaluatedProperties", "uniqueItems"}
)  # fmt: skip
_ALONE = {  # keywords which engines look at alone: what else they let stand beside themselves
    "$ref": frozenset({"$defs", "definitions"}),
    "anyOf": frozenset({"$defs", "definitions"}),
    "const": frozenset({"type"}),
    "enum": frozenset({"type"}),
    "format": frozenset({"type"}),
    "pattern": frozenset({"type"}),
}
_CLASS = re.compile(r"\[\^?\]?[^]]*\]")  # in a regular expression without escapes
_REGEX_ESCAPES = set("dDwWsS.\\[](){}*+?|^$/-nrt\"'")
_SPECIAL = re.compile(r"[.\\\[\](){}*+?|^$/\-\"']")  # what stands for itself with a \ before it, on all engines
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_CONTROL_IN_REGEX = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")  # all but those that lines of text have

ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


def read_response_format(value: object, param: str = "response_format") -> Grammar | None:
    """OpenAI's `response_format`; what Hugging Face's client makes of it is read, too. Raises: RequestError."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RequestError(f"{param} must be an object.", param=param)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_schema":
        wrapped = value.get("json_schema")
        schema = wrapped.get("schema") if isinstance(wrapped, dict) else value.get("schema", value.get("value"))
        return grammar_of_schema(schema, param)
    if kind in ("json_object", "json"):
        return grammar_of_schema(value["value"], param) if value.get("value") is not None else ANY_OBJECT
    if kind == "regex":
        return grammar_of_regex(value.get("value"), param)
    raise RequestError(f"{param} takes the types text, json_object and json_schema.", param=param)


def read_tgi_grammar(kind: str, value: object) -> Grammar:
    """TGI's `grammar`, in its words where it has some. Raises: RequestError."""
    if kind == "regex":
        return grammar_of_regex(value, "grammar")
    if kind not in ("json", "json_object", "json_schema"):
        raise RequestError("grammar is not valid: the types are json, json_schema and regex", param="grammar")
    if kind == "json_schema" and isinstance(value, dict) and isinstance(value.get("schema"), dict):
        value = value["schema"]
    if not isinstance(value, dict) or "properties" not in value:
        raise RequestError("grammar is not valid: Grammar must have a 'properties' field", param="grammar")
    return grammar_of_schema(value, "grammar")


def grammar_of_schema(schema: object, param: str) -> Grammar:
    """A JSON schema as a grammar, once it has been found to be one that engines honour. Raises: RequestError."""
    if not isinstance(schema, dict):
        raise RequestError(f"{param} needs a JSON schema.", param=param)
    _Schema(schema, param).check()
    return Grammar("json_schema", to_json(schema).decode())


class _Schema:
    """One schema from a client, on its way through the checks."""

    def __init__(self, root: JsonBody, param: str) -> None:
        self._root = root
        self._param = param
        self._num_schemas = 0
        self._num_values = 0
        self._length = 0
        self._num_characters = 0
        self._size = 0
        self._finite: set[int] = set()  # schemas, by identity, that have been found to come to an end

    def check(self) -> None:
        self._one(self._root, 0)
        if self._num_schemas > _MAX_SCHEMAS or self._num_values > _MAX_VALUES or self._length > _MAX_LENGTH:
            raise self._bad(
                f"it is too large: at most {_MAX_SCHEMAS} schemas, {_MAX_VALUES} values in enums, and {_MAX_LENGTH} "
                "characters in strings with a maxLength or minLength, together"
            )
        if self._num_characters > _MAX_CHARACTERS or self._size > _MAX_SIZE:
            raise self._bad(
                f"it is too large: at most {_MAX_CHARACTERS} characters in names and values, and patterns of "
                f"{_MAX_SIZE} with their counts written out, together"
            )

    def _one(self, schema: object, depth: int) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise self._bad("a schema is an object")
        self._num_schemas += 1
        if depth > _MAX_DEPTH or self._num_schemas > _MAX_SCHEMAS:
            raise self._bad(f"it is too large: at most {_MAX_SCHEMAS} schemas, nested {_MAX_DEPTH} deep")
        for name in schema:
            if name not in _CHECKED and name not in _ANNOTATIONS:
                which = f"the keyword {name}" if name in _KNOWN else "a keyword that it has"
                raise UnsupportedParameter(f"{self._param}: {which} is not supported.", param=self._param)
        self._keywords(schema)
        for inner in _inner(schema):
            if inner is False:  # what has to be there and may not takes an engine down
                raise self._bad("false is for additionalProperties, and for items beside prefixItems")
            self._one(inner, depth + 1)

    def _keywords(self, schema: JsonBody) -> None:
        kinds = schema.get("type", [])
        if not _is_list(kinds if isinstance(kinds, list) else [kinds], lambda kind: kind in _TYPES):
            raise self._bad("a type is object, array, string, integer, number, boolean or null")
        for name in ("minItems", "maxItems", "minLength", "maxLength"):
            most = _MAX_ITEMS if name.endswith("Items") else _MAX_LENGTH
            value = schema.get(name, 0)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise self._bad(f"{name} is no whole number")
            if value > most:
                raise self._bad(f"{name} is {most} at most here, since more takes engines too long")
        self._length += max(schema.get("maxLength", 0), schema.get("minLength", 0))
        for name in ("minimum", "maximum"):
            value = schema.get(name, 0)
            if (
                not isinstance(value, int)
                or isinstance(value, bool)
                or abs(value) > 10**12
                or (name in schema and schema.get("type") != "integer")
            ):
                raise self._bad(f"{name} is a whole number, and goes with the type integer")
        for low, high in (("minItems", "maxItems"), ("minLength", "maxLength"), ("minimum", "maximum")):
            if low in schema and high in schema and schema[low] > schema[high]:
                raise self._bad(f"{low} is above {high}")
        if not _is_list(schema.get("required", []), lambda name: isinstance(name, str)):
            raise self._bad("required is a list of names")
        if "enum" in schema:
            if not schema["enum"] or not _is_list(schema["enum"], _is_scalar):
                raise self._bad("enum is a list of strings, numbers, booleans and nulls")
            self._num_values += len(schema["enum"])
        if "const" in schema and not _is_scalar(schema["const"]):
            raise self._bad("const is a string, a number, a boolean or null")
        if "format" in schema and not _is_list([schema["format"]], lambda name: name in _FORMATS):
            raise self._bad(f"format is one of {', '.join(sorted(_FORMATS))}")
        if "pattern" in schema:
            grammar_of_regex(schema["pattern"], self._param)
            self._size += _size(_bare(schema["pattern"]))
        for name, beside in _ALONE.items():
            if name in schema and (_CHECKED & schema.keys()) - beside - {name}:
                raise self._bad(f"nothing else that restricts an answer goes beside {name}")
        if ("pattern" in schema or "format" in schema) and schema.get("type") != "string":
            raise self._bad("pattern and format go with the type string")
        if "$ref" in schema and not self._leads_somewhere(schema["$ref"]):
            raise self._bad("a $ref leads to #/$defs/name or #/definitions/name, and there to something else")
        for name in ("properties", "$defs", "definitions"):
            if not isinstance(schema.get(name, {}), dict):
                raise self._bad(f"{name} is an object")
        texts = (
            schema.get("properties", {}),
            schema.get("required", ()),
            schema.get("enum", ()),
            [schema.get("const")],
        )
        self._num_characters += sum(len(text) for some in texts for text in some if isinstance(text, str))
        if any(re.search(r'["\\\x00-\x1f]', name) for name in schema.get("properties", {})):
            raise self._bad("the name of a property has no quotes, backslashes or control characters")
        for name in ("anyOf", "prefixItems"):
            if name in schema and not (isinstance(schema[name], list) and schema[name]):
                raise self._bad(f"{name} is a list of schemas")
        num_places = len(schema.get("prefixItems", []))
        if num_places and not schema.get("minItems", 0) <= num_places <= schema.get("maxItems", num_places):
            raise self._bad("the prefixItems do not fit minItems and maxItems")

    def _leads_somewhere(self, reference: object) -> bool:
        target = self._target(reference)
        return isinstance(target, dict) and "$ref" not in target and not self._is_endless(target, [])

    def _target(self, reference: object) -> object:
        match = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", reference) if isinstance(reference, str) else None
        where = self._root.get(match[1]) if match else None
        return where.get(match[2]) if match and isinstance(where, dict) else None

    def _is_endless(self, schema: JsonBody, above: list[int]) -> bool:
        """A schema that is itself, or one of several of which it is one: it would never come to a character."""
        if id(schema) in above:
            return True
        if id(schema) in self._finite:  # else the ways through choices of choices would be counted, which are many
            return False
        choices = schema.get("anyOf", [])
        if not isinstance(choices, list) or len(above) > _MAX_DEPTH:
            return True
        for choice in choices:
            if isinstance(choice, dict):
                target = self._target(choice["$ref"]) if "$ref" in choice else choice
                if isinstance(target, dict) and self._is_endless(target, [*above, id(schema)]):
                    return True
        self._finite.add(id(schema))
        return False

    def _bad(self, reason: str) -> RequestError:
        return RequestError(f"{self._param}: this JSON schema cannot be used: {reason}.", param=self._param)


def _inner(schema: JsonBody) -> Iterator[object]:
    for name in ("properties", "$defs", "definitions"):
        yield from schema.get(name, {}).values()
    for name in ("anyOf", "prefixItems"):
        yield from schema.get(name, [])
    if "items" in schema and not ("prefixItems" in schema and schema["items"] is False):
        yield schema["items"]
    if schema.get("additionalProperties", False) is not False:
        yield schema["additionalProperties"]


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _is_list(value: object, allowed: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and all(not isinstance(one, list | dict) and allowed(one) for one in value)


def grammar_of_regex(text: object, param: str) -> Grammar:
    """A regular expression for a whole answer, of the kind that is one everywhere: no look-around, no back-references,
    no counts beyond reason. Raises: RequestError."""
    if not isinstance(text, str) or not text or len(text) > _MAX_TEXT:
        raise RequestError(f"{param}: a regular expression has 1 to {_MAX_TEXT} characters.", param=param)
    if _CONTROL_IN_REGEX.search(text):
        raise RequestError(
            f"{param}: a regular expression has no control characters but tab, newline and carriage return.",
            param=param,
        )
    escapes = re.findall(r"\\(.)", text, re.DOTALL)
    bare = _unescaped(text)
    classes = re.findall(_CLASS, bare)
    bare = _bare(text)
    if (
        re.search(r"\(\?(?!:)|[*+?}][+]|\$(?!\Z)|(?<!^)\^|\{(?![0-9]+(,[0-9]*)?\})", bare)
        or re.search(r"(?:\A\^?|\((?:\?:)?|\|)\||\|(?:\)|\$?\Z)", bare)  # nothing on one side of a |
        or any(re.search(r"\[\[|\[\^?\]|--|&&|~~|\|\|", one) for one in classes)
        or any(escape not in _REGEX_ESCAPES for escape in escapes)
        or any(int(count) > _MAX_REPEATS for count in re.findall("[0-9]+(?=[,0-9]*})", bare))
    ):
        raise UnsupportedParameter(
            f"{param}: of regular expressions, look-around, back-references, named groups, sets of sets, escapes "
            "beyond \\d, \\w, \\s, their opposites and those of single characters, empty alternatives, braces that are "
            f"no counts, and counts above {_MAX_REPEATS} are not supported.",
            param=param,
        )
    try:
        if "[" in bare:  # not closed, of which Python might warn before it raises
            raise re.error("a set without its end")
        re.compile(text)
    except (re.error, RecursionError, OverflowError):
        raise RequestError(f"{param}: this is not a regular expression.", param=param) from None
    if _size(bare) > _MAX_SIZE:
        raise UnsupportedParameter(
            f"{param}: this regular expression is too large: with its counts written out, it has at most {_MAX_SIZE} "
            f"characters, of which . and sets count for {_SET_SIZE} each.",
            param=param,
        )
    return Grammar("regex", text)


def grammar_of_choice(choices: object, param: str) -> Grammar:
    """A list of texts of which the answer is to be one. Raises: RequestError."""
    if not isinstance(choices, list) or not 1 <= len(choices) <= _MAX_VALUES:
        raise RequestError(f"{param} is a list of 1 to {_MAX_VALUES} texts.", param=param)
    if not all(isinstance(choice, str) and choice and not _CONTROL.search(choice) for choice in choices):
        raise RequestError(f"{param} has texts, none of them empty or with control characters.", param=param)
    escaped = [_SPECIAL.sub(r"\\\g<0>", choice) for choice in dict.fromkeys(choices)]
    return grammar_of_regex("|".join(escaped), param)


def _unescaped(text: str) -> str:
    """With a . for an escape that stands for a set, and an x for any other."""
    return re.sub(r"\\.", lambda match: "." if match[0][1] in "dDwWsS" else "x", text, flags=re.DOTALL)


def _bare(text: str) -> str:
    """A regular expression's structure: with a . for every set, too."""
    return re.sub(_CLASS, ".", _unescaped(text))


def _size(bare: str) -> int:
    """How large a regular expression is, in which a . stands for each set, when its counts are written out."""
    sizes, last = [0], 0  # of the groups that are open, and of what a count would repeat
    for one in re.findall(r"\(\?:|\{[^}]*\}|.", bare, re.DOTALL):
        if one[0] == "(":
            sizes.append(0)
        elif one[0] == "{":
            most = max(1, *(int(count) for count in re.findall("[0-9]+", one)))
            sizes[-1] += last * (most - 1)
            last *= most
        else:
            last = sizes.pop() if one == ")" else _SET_SIZE if one == "." else 1
            sizes[-1] += last
    return sizes[0]
