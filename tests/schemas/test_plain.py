"""Schemas of clients in plain form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from tailrace.schemas import GUIDANCE, PORTABLE, Reach, looser
from tailrace.schemas.conjunction import SchemaError
from tailrace.schemas.plain import MAX_STEPS, NO_ANSWER, plain_form

TEXT: Any = {"type": "string"}


def plain(schema: object, reach: Reach = GUIDANCE) -> Any:
    """Return the plain form of a schema of which nothing is left open."""
    found = plain_form(schema, reach)
    assert found.left_open == ()
    return found.schema


def opened(schema: object, reach: Reach = GUIDANCE) -> tuple[Any, tuple[str, ...]]:
    return plain_form(schema, reach)


def outcome(schema: object, reach: Reach) -> dict[str, Any] | SchemaError:
    try:
        return plain_form(schema, reach).schema
    except SchemaError as error:
        return error


def fault(schema: object) -> str:
    with pytest.raises(SchemaError) as refused:
        plain_form(schema, GUIDANCE)
    return str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        *({"type": kind} for kind in ("object", "array", "string", "integer", "number", "boolean", "null")),
        {"type": ["string", "null"]},
        {"type": "object", "properties": {"a": TEXT, "b": {}}, "required": ["a"], "additionalProperties": False},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 64},
        {"type": "array", "prefixItems": [{"type": "integer"}, TEXT], "items": False},
        {"type": "string", "minLength": 3, "maxLength": 48},
        {"type": "string", "format": "date-time"},
        {"type": "string", "pattern": "^[a-z]+$"},
        {"type": "integer", "minimum": -5, "maximum": 10**12},
        {"enum": ["a", 1, 1.5, True, None]},
        {"const": "é"},
        {"anyOf": [TEXT, {"type": "null"}]},
        {"$ref": "#/$defs/d0", "$defs": {"d0": {"type": "array", "items": {"$ref": "#/$defs/d0"}}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("reach", [GUIDANCE, PORTABLE])
def test_a_plain_schema_stays_as_it_is(schema: dict[str, Any], reach: Reach) -> None:
    found = plain(schema, reach)
    assert found == schema
    assert list(found.get("properties", ())) == list(schema.get("properties", ()))


def test_annotations_have_no_effect() -> None:
    schema = {"$schema": "s", "$id": "i", "$comment": "c", "title": "t", "description": "d", "default": 1,
              "examples": [1], "readOnly": True, "writeOnly": True, "deprecated": True}  # fmt: skip
    assert plain({**TEXT, **schema}) == TEXT


def test_unknown_keywords_and_formats_are_named() -> None:
    """A wrong name may be a mistake."""
    schema = {"type": "object", "properties": {"a/b": {**TEXT, "maxlength": 3, "x-order": 1, "format": "iri"}}}
    found, left_open = opened(schema)
    assert found == {"type": "object", "properties": {"a/b": TEXT}}
    assert left_open == tuple(f"#/properties/a~1b/{name}" for name in ("maxlength", "x-order", "format"))


@pytest.mark.parametrize(
    ("reference", "more"),
    [
        ("#/$defs/a", {"$defs": {"a": TEXT}}),
        ("#/definitions/a%20b", {"definitions": {"a b": TEXT}}),
        ("#/$defs/a~1b", {"$defs": {"a/b": TEXT}}),
        ("#/properties/other", {"properties": {"other": TEXT, "it": {"$ref": "#/properties/other"}}}),
        ("#/$defs/a/anyOf/0", {"$defs": {"a": {"anyOf": [TEXT, {}]}}}),
        ("#name", {"$defs": {"a": {**TEXT, "$anchor": "name"}}}),
        ("other.json", {"$defs": {"a": {**TEXT, "$id": "other.json"}}}),
        ("#/$defs/b", {"$defs": {"b": {"$ref": "#/$defs/a"}, "a": TEXT}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_references_lead_anywhere_in_the_schema(reference: str, more: dict[str, Any]) -> None:
    found = plain({"type": "object", "properties": {"it": {"$ref": reference}}, **more})
    assert found["properties"]["it"] == {"$ref": "#/$defs/d0"}
    assert found["$defs"] == {"d0": TEXT}


def test_a_reference_beside_other_keywords_is_merged() -> None:
    schema = {"$ref": "#/$defs/a", "maxLength": 3, "$defs": {"a": {**TEXT, "maxLength": 5, "minLength": 1}}}
    assert plain(schema) == {**TEXT, "minLength": 1, "maxLength": 3}


def test_a_reference_to_another_document_is_left_open() -> None:
    assert opened({"items": {"$ref": "http://example.com/a#/b"}}) == ({"type": "array", "items": {}}, ("#/items/$ref",))


def test_a_definition_without_any_value_is_left_out() -> None:
    also = {"items": {"$ref": "#/$defs/never"}, "minItems": 1}
    never = {"$defs": {"never": {"allOf": [TEXT, {"type": "null"}]}, "also": also}}
    lists = {"anyOf": [{"$ref": "#/$defs/also"}, {"type": "null"}]}
    assert plain({"properties": {"a": {"$ref": "#/$defs/never"}, "b": lists}, **never}) == {
        "type": "object",
        "properties": {"b": {"type": "null"}},
    }
    assert fault({"$ref": "#/$defs/never", **never}) == NO_ANSWER


def test_a_schema_that_contains_itself_stays_so() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    expected = {"type": "object", "properties": {"next": {"$ref": "#/$defs/d0"}}}
    assert plain(node) == {**expected, "$defs": {"d0": expected}}
    assert plain({"allOf": [{"$ref": "#"}, TEXT]}) == TEXT


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([{"type": ["string", "null"]}, {"type": ["null", "object"]}], {"type": "null"}),
        ([{"type": "number"}, {"type": "integer"}], {"type": "integer"}),
        ([{"type": "integer", "minimum": 1}, {"minimum": 3, "maximum": 9}],
         {"type": "integer", "minimum": 3, "maximum": 9}),
        ([{"properties": {"a": TEXT}, "required": ["a"]}, {"properties": {"b": {}}, "required": ["b"]}],
         {"type": "object", "properties": {"a": TEXT, "b": {}}, "required": ["a", "b"]}),
        ([{"properties": {"a": TEXT}}, {"properties": {"a": {"maxLength": 3}}}],
         {"type": "object", "properties": {"a": {**TEXT, "maxLength": 3}}}),
        ([{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}}],
         {"type": "object", "properties": {"a": {}}, "additionalProperties": False}),
        ([{"enum": [1, 2, "a"]}, {"enum": [2, "a", True]}, {"type": "string"}], {"const": "a"}),
        ([{"anyOf": [TEXT, {"type": "null"}]}, {"maxLength": 2, "type": ["string", "null"]}],
         {"anyOf": [{**TEXT, "maxLength": 2}, {"type": "null"}]}),
        ([{"items": TEXT}, {"prefixItems": [{"minLength": 1}]}],
         {"type": "array", "prefixItems": [{**TEXT, "minLength": 1}], "items": TEXT}),
    ],
    ids=str,
)  # fmt: skip
def test_all_of_is_merged(parts: list[Any], expected: dict[str, Any]) -> None:
    assert plain({"allOf": parts}) == expected
    assert plain({**parts[0], "allOf": parts[1:]}) == expected


def test_keywords_beside_any_of_hold_for_each_of_its_schemas() -> None:
    schema = {"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"properties": {"b": TEXT}}]}
    assert plain(schema) == {
        "anyOf": [
            {"type": "object", "properties": {"a": {}}, "required": ["a"]},
            {"type": "object", "properties": {"a": {}, "b": TEXT}},
        ]
    }


def tagged(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("schemas", "is_kept"),
    [
        ([TEXT, {"type": "integer"}], True),
        ([tagged("a"), tagged("b")], True),
        ([{"enum": [1, 2]}, {"const": 3}], True),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], True),
        ([{"type": "number"}, {"type": "integer"}], False),
        ([{"properties": {"a": {}}}, {"properties": {"b": {}}}], False),
    ],
    ids=str,
)
def test_one_of_is_any_of_and_named_if_several_may_fit(schemas: list[Any], is_kept: bool) -> None:
    found, left_open = opened({"oneOf": schemas, "$defs": {"a": tagged("a"), "b": tagged("b")}})
    assert len(found["anyOf"]) == 2
    assert left_open == (() if is_kept else ("#/oneOf",))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"exclusiveMinimum": 0, "type": "integer"}, {"type": "integer", "minimum": 1}),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, {"type": "integer", "minimum": 1}),
        ({"type": "integer", "maximum": 2.5}, {"type": "integer", "maximum": 2}),
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"items": [TEXT], "additionalItems": False}, {"type": "array", "prefixItems": [TEXT], "items": False}),
        ({"properties": {"a": True, "b": False}}, {"type": "object", "properties": {"a": {}}}),
        ({"required": ["a"]}, {"type": "object", "properties": {"a": {}}, "required": ["a"]}),
        ({"pattern": "a"}, {"type": "string", "pattern": "a"}),
        ({"enum": ["a", "b", "ccc"], "maxLength": 1}, {"enum": ["a", "b"]}),
        ({"items": False}, {"type": "array", "maxItems": 0}),
    ],
    ids=str,
)
def test_older_forms_and_what_is_left_out(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert plain(schema) == expected


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        *(({"type": "object", name: {}}, name) for name in ("not", "if", "then", "propertyNames", "dependentSchemas")),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "integer", "minimum": -(10**30)}, "minimum"),
        ({"type": "string", "maxLength": 10**6}, "maxLength"),
        ({"type": "array", "maxItems": 10**6}, "maxItems"),
        ({"enum": list(range(10_000))}, "enum"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_a_grammar_does_not_keep_is_left_open_and_named(schema: dict[str, Any], name: str) -> None:
    found, left_open = opened(schema)
    assert left_open == (f"#/{name}",)
    assert name not in found


def test_a_portable_grammar_keeps_less() -> None:
    schema = {"properties": {"a": {"type": "integer", "minimum": -(2**53 - 1)}, "b": {**TEXT, "maxLength": 100}}}
    found, left_open = opened(schema, PORTABLE)
    assert found == {"type": "object", "properties": {"a": {"type": "integer"}, "b": TEXT}}
    assert left_open == ("#/properties/a/minimum", "#/properties/b/maxLength")
    assert opened(schema)[1] == ()


def test_properties_named_by_patterns_may_have_any_name() -> None:
    schema = {"type": "object", "patternProperties": {"^x": TEXT}, "additionalProperties": False}
    assert opened(schema) == ({"type": "object", "additionalProperties": TEXT}, ("#/patternProperties/^x",))


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [TEXT, {"type": "null"}]},
        {"type": "string", "enum": [1]},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"anyOf": [False]},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
    ],
    ids=str,
)
def test_a_schema_without_any_value_is_refused(schema: dict[str, Any]) -> None:
    assert fault(schema) == NO_ANSWER


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"type": "kanarienvogel"}, "#/properties/a/type must be"),
        ({"type": []}, "#/properties/a/type must be"),
        ({"anyOf": []}, "#/properties/a/anyOf must be a list of schemas"),
        ({"allOf": {}}, "#/properties/a/allOf must be a list of schemas"),
        ({"enum": []}, "#/properties/a/enum must be a list of values"),
        ({"properties": 5}, "#/properties/a/properties must be an object"),
        ({"required": [1]}, "#/properties/a/required must be a list of names"),
        ({"minimum": "1"}, "#/properties/a/minimum must be a number"),
        ({"maxLength": -1}, "#/properties/a/maxLength must be a whole number"),
        ({"maxItems": True}, "#/properties/a/maxItems must be a number"),
        ({"multipleOf": 0}, "#/properties/a/multipleOf must be a positive number"),
        ({"pattern": 5}, "#/properties/a/pattern must be a text"),
        ({"items": 5}, "#/properties/a/items: a schema must be an object"),
        ({"prefixItems": [5]}, "#/properties/a/prefixItems/0: a schema must be an object"),
    ],
    ids=str,
)
def test_what_is_no_schema_is_refused_with_its_place(keywords: dict[str, Any], reason: str) -> None:
    assert fault({"properties": {"a": keywords}}).startswith(reason)
    assert "kanarienvogel" not in fault({"properties": {"a": keywords}})


def doubling(depth: int, keyword: str) -> dict[str, Any]:
    """Return a small schema that doubles with each level when its references are expanded."""
    links: dict[str, Any] = {f"a{depth}": {"properties": {"y": {}}}}
    for level in range(depth):
        link = {"$ref": f"#/$defs/a{level + 1}"}
        links[f"a{level}"] = {"properties": {"x": {}}, keyword: [link, {**link, "maxProperties": 9}]}
    return {"$ref": "#/$defs/a0", "$defs": links}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = TEXT
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(doubling(60, "anyOf"), marks=pytest.mark.deep),
        pytest.param(doubling(60, "oneOf"), marks=pytest.mark.deep),
        doubling(60, "allOf"),
        nested(300),
        {"$defs": {"a": {"properties": {"c": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}}},
                   "b": {"properties": {"c": {"allOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]}}}},
         "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
        {"allOf": [{"anyOf": [TEXT, {"type": "null"}]}] * 40},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#", "maxLength": 3}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"enum": [[{"a": 1}]] * 3_000},
        {"properties": {f"p{number}": {"$ref": "#"} for number in range(3_000)}},
        {"type": "string", "pattern": "(" * 100_000},
        # Work that grows with the square of the size, unless it is counted.
        {"allOf": [{"enum": list(range(5_000))}] * 50},
        {"enum": list(range(5_000)), "anyOf": [{"minimum": number} for number in range(250)]},
        {"properties": {f"p{number}": {"$ref": "#/$defs/a0"} for number in range(3_000)},
         "$defs": {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(5_000)} | {"a5000": TEXT}},
        {"properties": {f"p{number}": {"oneOf": [{"$ref": f"#/$defs/d{(number + k) % 300}"} for k in range(30)]}
                        for number in range(2_000)},
         "$defs": {f"d{number}": {"type": "object", "properties": {"k": {"const": number}}, "required": ["k"]}
                   for number in range(300)}},
    ],
    ids=lambda schema: str(schema)[:60],
)  # fmt: skip
def test_hostile_schemas_take_limited_work(schema: dict[str, Any]) -> None:
    """Either it is refused, or its plain form is not much larger."""
    for reach in looser(GUIDANCE):
        found = outcome(schema, reach)
        assert len(str(found)) < (200 if isinstance(found, SchemaError) else 100 * MAX_STEPS)


scalars = st.none() | st.booleans() | st.integers(-9, 10**13) | st.floats(allow_nan=False) | st.text(max_size=3)
keywords = st.sampled_from(
    ["$defs", "$ref", "additionalProperties", "allOf", "anyOf", "const", "enum", "exclusiveMinimum", "format", "items",
     "maxItems", "maxLength", "maximum", "minItems", "minLength", "minimum", "multipleOf", "nullable", "oneOf",
     "pattern", "patternProperties", "prefixItems", "properties", "required", "type", "a", "b"]
)  # fmt: skip
anything = st.recursive(
    scalars | st.sampled_from(["string", "integer", "object", "date", "#/$defs/a", "#", "[a-z]{3}"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keywords, inner, max_size=6),
    max_leaves=30,
)


@settings(max_examples=examples(500))
@given(anything)
def test_any_json_has_a_plain_form_or_is_refused(schema: object) -> None:
    for reach in (GUIDANCE, PORTABLE):
        assert str(outcome(schema, reach))
