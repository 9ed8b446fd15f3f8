from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from tailrace.errors import RequestError
from tailrace_plugins.inferless.inferless_errors import OutputError
from tailrace_plugins.inferless.inferless_wire import read, tensors_of, values_of
from tailrace_plugins.inferless.schema import Input, Schema

SCHEMA = Schema(
    {
        "TEXT": Input("TEXT", "BYTES"),
        "speed": Input("speed", "FP32", is_required=False),
        "ids": Input("ids", "INT32", (-1,), is_required=False),
        "grid": Input("grid", "INT32", (2, 2), is_required=False),
    }
)


def tensor(name: str, data: Any, shape: list[int] | None = None, datatype: str = "BYTES", **more: Any) -> Any:
    return {"name": name, "shape": shape or [1], "data": data, "datatype": datatype, **more}


TEXT = tensor("TEXT", ["Hello"])


@pytest.mark.parametrize(
    "body",
    [
        {"TEXT": "Hello"},
        {"parameters": {"TEXT": "Hello"}},
        {"inputs": [TEXT]},
        {"inputs": [tensor("TEXT", [["Hello"]], [1, 1])]},
        {"inputs": [tensor("TEXT", ["Hello"], [1, 1])]},
        {"inputs": [tensor("TEXT", ["Hello"], datatype="STRING", optional=False)]},
        {"inputs": [TEXT], "parameters": {"binary_data_output": True}},
    ],
)
def test_inputs_are_found_in_every_form(body: dict[str, Any]) -> None:
    assert read(body, SCHEMA).inputs == {"TEXT": "Hello"}


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (tensor("speed", [1], datatype="INT64"), {"speed": 1.0}),
        (tensor("speed", [0.5], datatype="FP64"), {"speed": 0.5}),
        (tensor("ids", [1, 2, 3], [3], "INT64"), {"ids": [1, 2, 3]}),
        (tensor("ids", [], [0], "INT64"), {"ids": []}),
        (tensor("ids", [[1, 2]], [1, 2], "INT32"), {"ids": [1, 2]}),
        (tensor("grid", [1, 2, 3, 4], [2, 2], "INT32"), {"grid": [[1, 2], [3, 4]]}),
        (tensor("grid", [[1, 2], [3, 4]], [2, 2], "INT32"), {"grid": [[1, 2], [3, 4]]}),
        (tensor("grid", [1, 2, 3, 4], [1, 2, 2], "INT32"), {"grid": [[1, 2], [3, 4]]}),
    ],
)
def test_tensors_are_nested_as_in_the_schema(given: Any, got: dict[str, object]) -> None:
    assert read({"inputs": [TEXT, given]}, SCHEMA).inputs == {"TEXT": "Hello", **got}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "TEXT"),
        ({"TEXT": "a", "parameters": {"TEXT": "a"}}, "TEXT"),
        ({"TEXT": "a", "text": "a"}, "text"),
        ({"TEXT": 8317}, "TEXT"),
        ({"inputs": [tensor("TEXT", ["8317"], datatype="INT8")]}, "TEXT"),
        ({"inputs": [tensor("TEXT", ["8317"], datatype="text")]}, "TEXT"),
        ({"inputs": [tensor("TEXT", ["8317", "8317"])]}, "TEXT"),
        ({"inputs": [TEXT, TEXT]}, "TEXT"),
        ({"inputs": [TEXT, tensor("other", [8317], datatype="INT8")]}, "other"),
        ({"inputs": [TEXT, tensor("ids", [1.0], datatype="FP32")]}, "ids"),
        ({"inputs": [TEXT, tensor("ids", [8317], [2], "INT32")]}, "ids"),
        ({"inputs": [TEXT, tensor("ids", [], [-1], "INT32")]}, "ids"),
        ({"inputs": [TEXT, tensor("ids", [], [10**12, 0], "INT32")]}, "ids"),
        ({"inputs": [TEXT, tensor("grid", [[1, 2], 8317], [2, 2], "INT32")]}, "grid"),
        ({"inputs": [TEXT, tensor("grid", [1, 2], [1, 2], "INT32")]}, "grid"),
        ({"inputs": "8317"}, "inputs"),
        ({"inputs": [{"name": "TEXT"}]}, "inputs[0]"),
        ({"TEXT": "a", "parameters": []}, "parameters"),
        ({"TEXT": "a", "id": "8" * 257}, "id"),
    ],
)
def test_errors_are_named_and_not_repeated(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(body, SCHEMA)
    assert caught.value.param == param
    assert "8317" not in caught.value.message


def test_names_of_the_wire_are_inputs_where_the_app_says_so() -> None:
    schema = Schema({name: Input(name, "BYTES") for name in ("id", "inputs", "parameters", "stream")})
    body = {"id": "a", "inputs": "b", "parameters": "c", "stream": "d"}
    asked = read(body, schema)
    assert (asked.inputs, asked.request_id, asked.stream) == (body, None, None)


def test_other_fields_are_kept() -> None:
    asked = read({"id": "7", "TEXT": "a", "stream": True, "outputs": [{"name": "OUT"}]}, SCHEMA)
    assert (asked.request_id, asked.stream, asked.outputs) == ("7", True, ("OUT",))


class Answer(BaseModel):
    OUT: str


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([1, 2]), [1, 2]),
        (np.str_("text"), "text"),
        (b"bytes \xc3\xa9", "bytes é"),
        (("a", 1, None), ["a", 1, None]),
        ({"a": {"b": np.int8(1)}}, {"a": {"b": 1}}),
        ("lone \ud800", "lone ?"),
        (2**64 - 1, 2**64 - 1),
    ],
)
def test_results_become_json(value: object, plain: object) -> None:
    (got,) = values_of({"OUT": value}).values()
    assert got == plain
    assert type(got) is type(plain)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "OUT: a value of type object, which cannot be JSON."),
        ([1, {"a": {1, 2}}], "OUT: a value of type set, which cannot be JSON."),
        (b"\xff", "OUT: bytes that are not UTF-8. Send them as base64."),
        (float("nan"), "OUT: nan is not a valid number in JSON."),
        (np.float32("inf"), "OUT: inf is not a valid number in JSON."),
        (2**64, "OUT: an integer of more than 64 bits."),
        ({1: 2}, "OUT: a dict whose keys are not strings."),
    ],
)
def test_values_that_json_does_not_have_are_named(value: object, reason: str) -> None:
    with pytest.raises(OutputError) as caught:
        values_of({"OUT": value})
    assert caught.value.message == reason
    with pytest.raises(OutputError):
        tensors_of({"OUT": value})


def test_outputs_are_a_dict_or_a_model_of_pydantic() -> None:
    assert values_of(Answer(OUT="a")) == {"OUT": "a"}
    with pytest.raises(OutputError, match="a dict of outputs, not str"):
        values_of("text")
    with pytest.raises(OutputError, match="one is int"):
        values_of({1: "text"})


@pytest.mark.parametrize(
    ("value", "datatype", "shape", "flat"),
    [
        ("a", "BYTES", [1], ["a"]),
        (True, "BOOL", [1], [True]),
        (3, "INT64", [1], [3]),
        (2**63, "UINT64", [1], [2**63]),
        (0.5, "FP64", [1], [0.5]),
        ([1, 0.5], "FP64", [2], [1, 0.5]),
        (["a", "b"], "BYTES", [2], ["a", "b"]),
        ([], "BYTES", [0], []),
        ([[1, 2], [3, 4]], "INT64", [2, 2], [1, 2, 3, 4]),
        (np.float32(0.5), "FP32", [1], [0.5]),
        (np.array([[1, 2]], dtype=np.uint8), "UINT8", [1, 2], [1, 2]),
        (np.array(["a"]), "BYTES", [1], ["a"]),
        (b"a", "BYTES", [1], ["a"]),
    ],
)
def test_tensors_have_the_datatype_of_their_values(value: object, datatype: str, shape: list[int], flat: Any) -> None:
    expected = {"name": "OUT", "datatype": datatype, "shape": shape, "data": flat}
    assert tensors_of({"OUT": value}) == [expected]


@pytest.mark.parametrize("value", [None, {"a": 1}, [{"a": 1}], ["a", 1], [True, 1], [[1], [1, 2]], [1, [2]]])
def test_invalid_tensors_are_named(value: object) -> None:
    with pytest.raises(OutputError, match=r"^OUT: .*\(json\.dumps\)\.$"):
        tensors_of({"OUT": value})
