from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field, field_validator

from tailrace.errors import RequestError
from tailrace_plugins.inferless.inferless_errors import AppError
from tailrace_plugins.inferless.schema import DATATYPES, Input, Schema, instance_of, read_fields, read_schema


def one(datatype: str, shape: list[int] | None = None, **more: Any) -> Input:
    return read_schema({"X": {"datatype": datatype, "shape": shape or [1], **more}}).inputs["X"]


def test_a_schema_keeps_its_order() -> None:
    schema = read_schema(
        {
            "TEXT": {"datatype": "STRING", "shape": [1], "required": True, "example": ["Hello"]},
            "sizes": {"datatype": "INT16", "shape": [-1], "required": False},
            "ready": {"datatype": "BOOLEAN", "shape": [1]},
        }
    )
    assert schema.tensors() == [
        {"name": "TEXT", "datatype": "BYTES", "shape": [1]},
        {"name": "sizes", "datatype": "INT16", "shape": [-1]},
        {"name": "ready", "datatype": "BOOL", "shape": [1]},
    ]
    assert [each.is_required for each in schema.inputs.values()] == [True, False, True]
    assert schema.sample() == {"TEXT": "Hello", "ready": True}


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        (["TEXT"], "INPUT_SCHEMA must be a dict of inputs, not list"),
        ({1: {}}, "whose name is not a string"),
        ({"TEXT": "STRING"}, "INPUT_SCHEMA['TEXT'] must be a dict, not str"),
        ({"TEXT": {"shape": [1]}}, "INPUT_SCHEMA['TEXT'] has no datatype"),
        ({"TEXT": {"datatype": "string", "shape": [1]}}, "INPUT_SCHEMA['TEXT']: the datatype 'string' is unknown"),
        ({"TEXT": {"datatype": ["STRING"], "shape": [1]}}, "the datatype ['STRING'] is unknown"),
        ({"TEXT": {"datatype": "STRING"}}, "INPUT_SCHEMA['TEXT'] has no shape"),
        ({"TEXT": {"datatype": "STRING", "shape": 1}}, "its shape must be a list of lengths"),
        ({"TEXT": {"datatype": "STRING", "shape": []}}, "its shape must be a list of lengths"),
        ({"TEXT": {"datatype": "STRING", "shape": [0]}}, "its shape contains 0"),
        ({"TEXT": {"datatype": "STRING", "shape": [True]}}, "its shape contains True"),
        ({"TEXT": {"datatype": "STRING", "shape": [1], "required": "yes"}}, "required must be True or False"),
        ({"TEXT": {"datatype": "STRING", "shape": [1], "requierd": True}}, "has the unknown field 'requierd'"),
    ],
)
def test_invalid_schemas_are_named(declared: object, reason: str) -> None:
    with pytest.raises(AppError) as caught:
        read_schema(declared)
    assert str(caught.value).startswith("input_schema.py: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize("datatype", sorted(DATATYPES))
def test_every_datatype_has_a_valid_sample(datatype: str) -> None:
    for shape in ([1], [-1], [2, 3]):
        taken = one(datatype, shape)
        assert taken.value(taken.sample()) == taken.sample()


@pytest.mark.parametrize(
    ("datatype", "shape", "given", "got"),
    [
        ("STRING", [1], "a", "a"),
        ("STRING", [1], ["a"], "a"),
        ("BYTES", [-1], ["a", "b"], ["a", "b"]),
        ("BYTES", [-1], [], []),
        ("INT8", [1], -128, -128),
        ("UINT64", [1], 2**64 - 1, 2**64 - 1),
        ("FP32", [1], 1, 1.0),
        ("BF16", [2], [0.5, 2], [0.5, 2.0]),
        ("BOOL", [1], False, False),
        ("INT32", [2, 2], [[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        ("INT32", [-1, 2], [[1, 2]], [[1, 2]]),
        ("STRING", [1, 1], [["a"]], [["a"]]),
    ],
)
def test_values_have_the_form_of_the_shape(datatype: str, shape: list[int], given: object, got: object) -> None:
    value = one(datatype, shape).value(given)
    assert value == got
    assert type(value) is type(got)


@pytest.mark.parametrize(
    ("datatype", "shape", "given", "reason"),
    [
        ("STRING", [1], 8317, "X: expected a string."),
        ("STRING", [1], ["8317", "8317"], "X: expected a string."),
        ("BOOL", [1], 1, "X: expected true or false."),
        ("INT8", [1], 8317, "X: expected an integer from -128 to 127."),
        ("UINT8", [1], -1, "X: expected an integer from 0 to 255."),
        ("INT64", [1], True, "X: expected an integer from -9223372036854775808 to 9223372036854775807."),
        ("INT16", [1], 8317.0, "X: expected an integer from -32768 to 32767."),
        ("FP32", [1], "8317", "X: expected a number."),
        ("FP64", [1], float("nan"), "X: expected a number."),
        ("FP64", [1], float("inf"), "X: expected a number."),
        pytest.param("FP64", [1], 10**400, "X: expected a number.", id="too-large"),
        ("FP64", [1], True, "X: expected a number."),
        ("STRING", [-1], "8317", "X: expected a list of strings."),
        ("STRING", [-1], ["a", 8317], "X: expected a list of strings."),
        ("FP32", [3], [1.0], "X: expected a list of 3 numbers."),
        ("FP32", [1, 2], [[1.0]], "X: expected lists of numbers of shape [1, 2]."),
        ("FP32", [1, 2], [1.0, 2.0], "X: expected lists of numbers of shape [1, 2]."),
    ],
)
def test_invalid_values_are_refused_and_not_repeated(
    datatype: str, shape: list[int], given: object, reason: str
) -> None:
    with pytest.raises(RequestError) as caught:
        one(datatype, shape).value(given)
    assert caught.value.message == reason
    assert caught.value.param == "X"
    assert "8317" not in caught.value.message


def test_missing_and_unknown_inputs_are_refused() -> None:
    schema = Schema({"a": Input("a", "BYTES"), "b": Input("b", "BYTES", is_required=False)})
    assert schema.check({"a": "x"}) == {"a": "x"}
    assert schema.check({"a": "x", "b": None}) == {"a": "x"}
    with pytest.raises(RequestError, match=r"^a: this input is required\.$"):
        schema.check({"b": "x"})
    with pytest.raises(RequestError, match=r"^c\?\?: there is no such input\. The inputs are: a, b\.$"):
        schema.check({"a": "x", "c\n<": "x"})


class Colour(StrEnum):
    RED = "red"


class Question(BaseModel):
    prompt: str = Field(examples=["Why?"])
    seed: int
    speed: float = 0.5
    loud: Optional[bool]  # noqa: UP045  # as apps write it
    words: list[str] | None = None
    grid: list[list[float]] = []
    style: Literal["a", "b"] = "a"
    colour: Colour = Colour.RED
    amount: int | float = 1

    @field_validator("prompt")
    @classmethod
    def is_polite(cls, prompt: str) -> str:
        if "8317" in prompt:
            raise ValueError(f"not {prompt}")
        return prompt


def test_a_model_of_pydantic_is_a_schema() -> None:
    schema = read_fields(Question)
    shown = {each.name: (each.datatype, each.shape, each.is_required) for each in schema.inputs.values()}
    assert shown == {
        "prompt": ("BYTES", (1,), True),
        "seed": ("INT64", (1,), True),
        "speed": ("FP64", (1,), False),
        "loud": ("BOOL", (1,), False),
        "words": ("BYTES", (-1,), False),
        "grid": ("FP64", (-1, -1), False),
        "style": ("BYTES", (1,), False),
        "colour": ("BYTES", (1,), False),
        "amount": ("FP64", (1,), False),
    }
    assert schema.inputs["prompt"].sample() == "Why?"


def test_optional_fields_of_an_instance_are_none_and_others_have_defaults() -> None:
    asked = instance_of(Question, read_fields(Question).check({"prompt": "Why?", "seed": 3}))
    assert isinstance(asked, Question)
    assert (asked.prompt, asked.seed, asked.loud, asked.speed, asked.colour) == ("Why?", 3, None, 0.5, Colour.RED)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"style": "8317"}, "style: Input should be 'a' or 'b'."),
        ({"prompt": "8317"}, "prompt: The app rejects this value."),
    ],
)
def test_refusals_of_the_model_are_named_and_not_repeated(given: dict[str, object], reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        instance_of(Question, {"prompt": "Why?", "seed": 3, **given})
    assert caught.value.message == reason
    assert caught.value.param == next(iter(given))


def test_a_field_without_a_datatype_is_named() -> None:
    class Odd(BaseModel):
        extra: dict[str, str]

    with pytest.raises(AppError, match=r"^app\.py: Odd\.extra: its type has no datatype"):
        read_fields(Odd)
