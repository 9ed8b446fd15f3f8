"""Reads grammars of answers from requests: JSON schemas and regular expressions, within limits that are safe.

An engine compiles a grammar inside a step, so all sequences wait, and some grammars crash engines: a property name with
a quote, or an empty alternative, is enough. So schemas may use only the keywords below, which all engines support, and
only up to the limits below. How long an engine needs for a grammar within these limits depends on its library and on
the vocabulary, so each grammar is tried in another process first (`engines.grammars.check`).
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

_MAX_SCHEMAS = 100  # including nested ones
_MAX_VALUES = 200  # of all enums
_MAX_LENGTH = 48  # sum of maxLength or minLength of all strings: 48 take 4.3 of the 5 million steps of OpenVINO
_MAX_CHARACTERS = 20_000  # of all names and values; ten times as many took 1.1 s
_MAX_ITEMS = 64
_MAX_DEPTH = 16
_MAX_TEXT = 2_000  # characters of a regular expression
_MAX_REPEATS = 64
_MAX_SIZE = 4_096  # sum of all regular expressions, with their counts expanded
_SET_SIZE = 64  # of a character set: .{128} took 2 s, (.{64}){64} 34 s, (a{64}){64} 0.1 s

_TYPES = frozenset({"object", "array", "string", "integer", "number", "boolean", "null"})
_FORMATS = frozenset({"date", "time", "date-time", "email", "uuid", "ipv4", "ipv6"})
_ANNOTATIONS = frozenset({"$schema", "$id", "title", "description", "default", "examples", "strict"})
_CHECKED = frozenset(
    {"$defs", "$ref", "additionalProperties", "anyOf", "const", "definitions", "enum", "format", "items", "maxItems",
     "maxLength", "maximum", "minItems", "minLength", "minimum", "pattern", "prefixItems", "properties", "required",
     "type"}
)  # fmt: skip
_KNOWN = frozenset(  # unsupported keywords of JSON Schema; only these are named in errors, never the client's own text
    {"additionalItems", "allOf", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else",
     "exclusiveMaximum", "exclusiveMinimum", "if", "maxContains", "maxProperties", "minContains", "minProperties",
     "multipleOf", "not", "nullable", "oneOf", "patternProperties", "propertyNames", "then", "unevaluatedItems",
     "unevaluatedProperties", "uniqueItems"}
)  # fmt: skip
_ALLOWED_BESIDE = {  # engines ignore other keywords beside these: the keywords that are allowed beside them
    "$ref": frozenset({"$defs", "definitions"}),
    "anyOf": frozenset({"$defs", "definitions"}),
    "const": frozenset({"type"}),
    "enum": frozenset({"type"}),
    "format": frozenset({"type"}),
    "pattern": frozenset({"type"}),
}
_CLASS = re.compile(r"\[\^?\]?[^]]*\]")  # in a regular expression without escapes
_REGEX_ESCAPES = set("dDwWsS.\\[](){}*+?|^$/-nrt\"'")
_SPECIAL = re.compile(r"[.\\\[\](){}*+?|^$/\-\"']")  # characters that all engines allow to be escaped with \
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_CONTROL_IN_REGEX = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")  # all but tab, newline and carriage return

ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


def read_response_format(value: object, param: str = "response_format") -> Grammar | None:
    """Read OpenAI's `response_format`, also in the form of Hugging Face's client. Raises: RequestError."""
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
    """Read TGI's `grammar`, with TGI's error messages. Raises: RequestError."""
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
    """Return a grammar from a JSON schema that all engines support. Raises: RequestError."""
    if not isinstance(schema, dict):
        raise RequestError(f"{param} needs a JSON schema.", param=param)
    _Schema(schema, param).check()
    return Grammar("json_schema", to_json(schema).decode())


class _Schema:
    """Checks a schema of a client."""

    def __init__(self, root: JsonBody, param: str) -> None:
        self._root = root
        self._param = param
        self._num_schemas = 0
        self._num_values = 0
        self._length = 0
        self._num_characters = 0
        self._size = 0
        self._finite: set[int] = set()  # ids of schemas that are known not to be infinite

    def check(self) -> None:
        self._check_schema(self._root, 0)
        if self._num_schemas > _MAX_SCHEMAS or self._num_values > _MAX_VALUES or self._length > _MAX_LENGTH:
            raise self._error(
                f"it is too large: at most {_MAX_SCHEMAS} schemas, {_MAX_VALUES} values in enums, and {_MAX_LENGTH} "
                "characters in strings with a maxLength or minLength, together"
            )
        if self._num_characters > _MAX_CHARACTERS or self._size > _MAX_SIZE:
            raise self._error(
                f"it is too large: at most {_MAX_CHARACTERS} characters in names and values, and {_MAX_SIZE} in all "
                "patterns with their counts expanded"
            )

    def _check_schema(self, schema: object, depth: int) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise self._error("a schema must be an object")
        self._num_schemas += 1
        if depth > _MAX_DEPTH or self._num_schemas > _MAX_SCHEMAS:
            raise self._error(f"it is too large: at most {_MAX_SCHEMAS} schemas, nested {_MAX_DEPTH} deep")
        for name in schema:
            if name not in _CHECKED and name not in _ANNOTATIONS:
                which = f"the keyword {name}" if name in _KNOWN else "one of its keywords"
                raise UnsupportedParameter(f"{self._param}: {which} is not supported.", param=self._param)
        self._check_keywords(schema)
        for subschema in _subschemas(schema):
            if subschema is False:  # a required part that cannot match crashes engines
                raise self._error("false is allowed only for additionalProperties, and for items beside prefixItems")
            self._check_schema(subschema, depth + 1)

    def _check_keywords(self, schema: JsonBody) -> None:
        kinds = schema.get("type", [])
        if not _is_list(kinds if isinstance(kinds, list) else [kinds], lambda kind: kind in _TYPES):
            raise self._error("type must be object, array, string, integer, number, boolean or null")
        for name in ("minItems", "maxItems", "minLength", "maxLength"):
            most = _MAX_ITEMS if name.endswith("Items") else _MAX_LENGTH
            value = schema.get(name, 0)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise self._error(f"{name} must be a whole number")
            if value > most:
                raise self._error(f"{name} must be at most {most}, because engines need too long for more")
        self._length += max(schema.get("maxLength", 0), schema.get("minLength", 0))
        for name in ("minimum", "maximum"):
            value = schema.get(name, 0)
            if (
                not isinstance(value, int)
                or isinstance(value, bool)
                or abs(value) > 10**12
                or (name in schema and schema.get("type") != "integer")
            ):
                raise self._error(f"{name} must be a whole number, and needs the type integer")
        for low, high in (("minItems", "maxItems"), ("minLength", "maxLength"), ("minimum", "maximum")):
            if low in schema and high in schema and schema[low] > schema[high]:
                raise self._error(f"{low} is larger than {high}")
        if not _is_list(schema.get("required", []), lambda name: isinstance(name, str)):
            raise self._error("required must be a list of names")
        if "enum" in schema:
            if not schema["enum"] or not _is_list(schema["enum"], _is_scalar):
                raise self._error("enum must be a list of strings, numbers, booleans and nulls")
            self._num_values += len(schema["enum"])
        if "const" in schema and not _is_scalar(schema["const"]):
            raise self._error("const must be a string, a number, a boolean or null")
        if "format" in schema and not _is_list([schema["format"]], lambda name: name in _FORMATS):
            raise self._error(f"format must be one of {', '.join(sorted(_FORMATS))}")
        if "pattern" in schema:
            grammar_of_regex(schema["pattern"], self._param)
            self._size += _size(_structure(schema["pattern"]))
        for name, beside in _ALLOWED_BESIDE.items():
            if name in schema and (_CHECKED & schema.keys()) - beside - {name}:
                raise self._error(f"{name} cannot be combined with other keywords that restrict an answer")
        if ("pattern" in schema or "format" in schema) and schema.get("type") != "string":
            raise self._error("pattern and format need the type string")
        if "$ref" in schema and not self._is_valid_reference(schema["$ref"]):
            raise self._error("a $ref must lead to #/$defs/name or #/definitions/name, and not to another $ref or back")
        for name in ("properties", "$defs", "definitions"):
            if not isinstance(schema.get(name, {}), dict):
                raise self._error(f"{name} must be an object")
        texts = (
            schema.get("properties", {}),
            schema.get("required", ()),
            schema.get("enum", ()),
            [schema.get("const")],
        )
        self._num_characters += sum(len(text) for some in texts for text in some if isinstance(text, str))
        if any(re.search(r'["\\\x00-\x1f]', name) for name in schema.get("properties", {})):
            raise self._error("the name of a property must not have quotes, backslashes or control characters")
        for name in ("anyOf", "prefixItems"):
            if name in schema and not (isinstance(schema[name], list) and schema[name]):
                raise self._error(f"{name} must be a list of schemas")
        num_items = len(schema.get("prefixItems", []))
        if num_items and not schema.get("minItems", 0) <= num_items <= schema.get("maxItems", num_items):
            raise self._error("minItems and maxItems do not allow the number of prefixItems")

    def _is_valid_reference(self, reference: object) -> bool:
        target = self._target(reference)
        return isinstance(target, dict) and "$ref" not in target and not self._is_infinite(target, [])

    def _target(self, reference: object) -> object:
        match = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", reference) if isinstance(reference, str) else None
        where = self._root.get(match[1]) if match else None
        return where.get(match[2]) if match and isinstance(where, dict) else None

    def _is_infinite(self, schema: JsonBody, above: list[int]) -> bool:
        """Return whether a schema contains itself through anyOf and $ref alone, and so never produces a character."""
        if id(schema) in above:
            return True
        if id(schema) in self._finite:  # without this check, the time would grow exponentially with nested anyOf
            return False
        choices = schema.get("anyOf", [])
        if not isinstance(choices, list) or len(above) > _MAX_DEPTH:
            return True
        for choice in choices:
            if isinstance(choice, dict):
                target = self._target(choice["$ref"]) if "$ref" in choice else choice
                if isinstance(target, dict) and self._is_infinite(target, [*above, id(schema)]):
                    return True
        self._finite.add(id(schema))
        return False

    def _error(self, reason: str) -> RequestError:
        return RequestError(f"{self._param}: this JSON schema cannot be used: {reason}.", param=self._param)


def _subschemas(schema: JsonBody) -> Iterator[object]:
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
    """Return a grammar from a regular expression for the whole answer, in the syntax that all engines support: without
    look-around, back-references or large counts. Raises: RequestError."""
    if not isinstance(text, str) or not text or len(text) > _MAX_TEXT:
        raise RequestError(f"{param}: a regular expression must have 1 to {_MAX_TEXT} characters.", param=param)
    if _CONTROL_IN_REGEX.search(text):
        raise RequestError(
            f"{param}: a regular expression has no control characters but tab, newline and carriage return.",
            param=param,
        )
    escapes = re.findall(r"\\(.)", text, re.DOTALL)
    structure = _unescaped(text)
    classes = re.findall(_CLASS, structure)
    structure = _structure(text)
    if (
        re.search(r"\(\?(?!:)|[*+?}][+]|\$(?!\Z)|(?<!^)\^|\{(?![0-9]+(,[0-9]*)?\})", structure)
        or re.search(r"(?:\A\^?|\((?:\?:)?|\|)\||\|(?:\)|\$?\Z)|\((?:\?:)?\)", structure)  # an empty part
        or any(re.search(r"\[\[|\[\^?\]|--|&&|~~|\|\|", one) for one in classes)
        or any(escape not in _REGEX_ESCAPES for escape in escapes)
        or any(int(count) > _MAX_REPEATS for count in re.findall("[0-9]+(?=[,0-9]*})", structure))
    ):
        raise UnsupportedParameter(
            f"{param}: these parts of regular expressions are not supported: look-around, back-references, named "
            "groups, nested sets, escapes other than \\d, \\w, \\s, \\D, \\W, \\S and those of single characters, "
            f"empty groups and alternatives, braces that are not counts, and counts above {_MAX_REPEATS}.",
            param=param,
        )
    try:
        if "[" in structure:  # Python may warn about an open set before it raises
            raise re.error("a set without its end")
        re.compile(text)
    except (re.error, RecursionError, OverflowError):
        raise RequestError(f"{param}: this is not a regular expression.", param=param) from None
    if _size(structure) > _MAX_SIZE:
        raise UnsupportedParameter(
            f"{param}: this regular expression is too large: with its counts expanded, it may have {_MAX_SIZE} "
            f"characters; . and sets count as {_SET_SIZE} each.",
            param=param,
        )
    return Grammar("regex", text)


def grammar_of_choice(choices: object, param: str) -> Grammar:
    """Return a grammar for answers that are one of these texts. Raises: RequestError."""
    if not isinstance(choices, list) or not 1 <= len(choices) <= _MAX_VALUES:
        raise RequestError(f"{param} must be a list of 1 to {_MAX_VALUES} texts.", param=param)
    if not all(isinstance(choice, str) and choice and not _CONTROL.search(choice) for choice in choices):
        raise RequestError(f"The texts of {param} must not be empty or have control characters.", param=param)
    escaped = [_SPECIAL.sub(r"\\\g<0>", choice) for choice in dict.fromkeys(choices)]
    return grammar_of_regex("|".join(escaped), param)


def _unescaped(text: str) -> str:
    """Replace escapes of sets by a ., and other escapes by an x."""
    return re.sub(r"\\.", lambda match: "." if match[0][1] in "dDwWsS" else "x", text, flags=re.DOTALL)


def _structure(text: str) -> str:
    """Return the structure of a regular expression: each set is replaced by a ."""
    return re.sub(_CLASS, ".", _unescaped(text))


def _size(structure: str) -> int:
    """Return the size of a `_structure` with its counts expanded."""
    sizes, last = [0], 0  # of the open groups, and of the part that a following count repeats
    for one in re.findall(r"\(\?:|\{[^}]*\}|.", structure, re.DOTALL):
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
