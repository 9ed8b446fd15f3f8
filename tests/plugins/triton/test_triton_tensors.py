"""Binary tensors of KServe's v2 protocol: whole ones become values, all others are refused without an echo."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dialects.fake_server import parsed
from tests.dialects.transcripts import facts

from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.wire import GenerateCall
from tailrace.errors import RequestError
from tailrace.types import End, TextDelta, Usage
from tailrace_plugins.triton import triton_wire as triton
from tailrace_plugins.triton.triton_tensors import HEADER_LENGTH, binary_text, read_tensors
from tailrace_plugins.triton.triton_wire import TritonEncoder, TritonView

Json = Any  # Any: of JSON
PROMPT = "Tell me of rivers \U0001f30a."


def framed(tensors: list[tuple[str, str, bytes]], *, more: bytes = b"", **fields: Json) -> tuple[bytes, dict[str, str]]:
    """Return a body with binary tensors, and its headers."""
    inputs = [
        {"name": name, "shape": [1], "datatype": kind, "parameters": {"binary_data_size": len(content)}}
        for name, kind, content in tensors
    ]
    head = json.dumps({"inputs": inputs, **fields}).encode()
    return head + b"".join(content for _, _, content in tensors) + more, {HEADER_LENGTH: str(len(head))}


def values(*tensors: tuple[str, str, bytes]) -> list[Json]:
    return [tensor["data"] for tensor in read_tensors(*framed(list(tensors)))["inputs"]]


def call_of(body: bytes, headers: dict[str, str]) -> GenerateCall:
    triton.check_headers(headers)
    return triton.parse_infer(parsed(read_tensors(body, headers), path={"model": "scripted"}))


@pytest.mark.parametrize(
    ("kind", "dtype", "value"),
    [
        ("BOOL", "?", True),
        ("INT8", "<i1", -7), ("UINT8", "<u1", 200), ("INT16", "<i2", -300), ("UINT16", "<u2", 60_000),
        ("INT32", "<i4", -70_000), ("UINT32", "<u4", 2**32 - 1), ("INT64", "<i8", -(2**63)),
        ("UINT64", "<u8", 2**64 - 1),
        ("FP16", "<f2", 0.5), ("FP32", "<f4", 0.25), ("FP64", "<f8", 0.7),
    ],
)  # fmt: skip
def test_numbers(kind: str, dtype: str, value: object) -> None:
    assert values(("x", kind, numpy.array([value], dtype=dtype).tobytes())) == [[value]]


def test_the_upper_half_of_a_float() -> None:
    assert values(("x", "BF16", struct.pack("<f", 0.5)[2:])) == [[0.5]]


def test_texts() -> None:
    assert values(("x", "BYTES", binary_text(PROMPT))) == [[PROMPT]]
    assert values(("x", "BYTES", binary_text("") + binary_text("a"))) == [["", "a"]]
    assert values(("x", "BYTES", b"")) == [[]]


def test_a_request_in_binary_is_that_in_json() -> None:
    sampling = [("max_tokens", "INT32", struct.pack("<i", 24)), ("temperature", "FP32", struct.pack("<f", 0.5))]
    binary = call_of(*framed([("text_input", "BYTES", binary_text(PROMPT)), *sampling], id="seven"))
    tensors = [
        {"name": name, "shape": [1], "datatype": kind, "data": [value]}
        for name, kind, value in (
            ("text_input", "BYTES", PROMPT),
            ("max_tokens", "INT32", 24),
            ("temperature", "FP32", 0.5),
        )
    ]
    assert binary == triton.parse_infer(parsed({"inputs": tensors, "id": "seven"}, path={"model": "scripted"}))


def test_tensors_of_both_forms_may_stand_beside_each_other() -> None:
    content = binary_text(PROMPT)
    head = json.dumps({"inputs": [
        {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [24]},
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(content)}},
    ]}).encode()  # fmt: skip
    call = call_of(head + content, {HEADER_LENGTH: str(len(head))})
    assert call.request.sampling.max_tokens == 24


def _wrong() -> dict[str, tuple[bytes, dict[str, str]]]:
    text = binary_text("Kanarienvogel")
    body, headers = framed([("TEXT", "BYTES", text)])
    long = {HEADER_LENGTH: str(len(body) + 1)}
    found = {
        "a byte is missing": (body[:-1], headers),
        "a byte too many": (body + b"x", headers),
        "no bytes at all": (body[: int(headers[HEADER_LENGTH])], headers),
        "the JSON is longer than the body": (body, long),
        "the JSON is cut": (body, {HEADER_LENGTH: str(int(headers[HEADER_LENGTH]) - 1)}),
        "a length that is no number": (body, {HEADER_LENGTH: "1e3"}),
        "a length below zero": (body, {HEADER_LENGTH: "-1"}),
        "a length in other digits": (body, {HEADER_LENGTH: "\u0663"}),
        "a length of many digits": (body, {HEADER_LENGTH: "9" * 5000}),
        "a text longer than its tensor": framed([("TEXT", "BYTES", b"\xff\xff\xff\xffKanarienvogel")]),
        "a text without its whole length": framed([("TEXT", "BYTES", b"\1\0")]),
        "half an integer": framed([("TEXT", "BYTES", text), ("max_tokens", "INT32", b"\1\0")]),
        "half a BF16": framed([("TEXT", "BYTES", text), ("temperature", "BF16", b"\1\0\1")]),
        "no number": framed([("TEXT", "BYTES", text), ("temperature", "FP32", struct.pack("<f", float("nan")))]),
        "infinity": framed([("TEXT", "BYTES", text), ("temperature", "FP64", struct.pack("<d", float("inf")))]),
        "an unknown datatype": framed([("TEXT", "Kanarienvogel", text)]),
        "text that is not UTF-8": framed([("TEXT", "BYTES", b"\1\0\0\0\xff")]),
        "two elements": framed([("TEXT", "BYTES", text * 2)]),
        "no element": framed([("TEXT", "BYTES", b"")]),
    }
    for name, size in (("text", "5"), ("below zero", -1), ("truth", True), ("fraction", 1.5), ("null", None)):
        tensor = {"name": "TEXT", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": size}}
        head = json.dumps({"inputs": [tensor]}).encode()
        found[f"a size: {name}"] = (head + text, {HEADER_LENGTH: str(len(head))})
    both = {"name": "TEXT", "shape": [1], "datatype": "BYTES", "data": ["a"], "parameters": {"binary_data_size": 5}}
    head = json.dumps({"inputs": [both]}).encode()
    return {**found, "data in both forms": (head + b"\1\0\0\0a", {HEADER_LENGTH: str(len(head))})}


@pytest.mark.parametrize("name", _wrong())
def test_malformed_frames_are_refused_without_an_echo(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        call_of(*_wrong()[name])
    assert caught.value.status == 400
    assert "Kanarienvogel" not in caught.value.message


@given(st.binary(max_size=60), st.integers(0, 80), st.sampled_from(["BYTES", "INT32", "FP16", "BOOL", "BF16"]))
def test_any_bytes_are_values_or_refused(content: bytes, size: int, kind: str) -> None:
    tensor = {"name": "x", "shape": [1], "datatype": kind, "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor]}).encode()
    try:
        read = read_tensors(head + content, {HEADER_LENGTH: str(len(head))})
    except RequestError:
        return
    assert size == len(content)
    json.dumps(read)


@pytest.mark.parametrize(
    ("fields", "is_binary"),
    [
        ({}, False),
        ({"parameters": {"binary_data_output": True}}, True),  # of the official client, if it names no output
        ({"outputs": [{"name": "OUT", "parameters": {"binary_data": True}}]}, True),  # and if it names one
        ({"parameters": {"binary_data_output": True},
          "outputs": [{"name": "OUT", "parameters": {"binary_data": False}}]}, False),
        ({"outputs": [{"name": "OUT"}], "parameters": {"binary_data_output": True}}, True),
        ({"outputs": [{"name": "OUT"}], "parameters": {"binary_data_output": False}}, False),
    ],
    ids=str,
)  # fmt: skip
def test_the_form_of_the_output(fields: JsonBody, is_binary: bool) -> None:
    call = call_of(*framed([("TEXT", "BYTES", binary_text("Hi"))], **fields))
    assert call.ignored == ()
    assert isinstance(call.view, TritonView)
    assert call.view.is_binary == is_binary


def test_an_output_in_binary() -> None:
    encoder = TritonEncoder(facts(), TritonView("OUT", is_tensor=True, is_binary=True, request_id="seven"))
    body = encoder.whole([TextDelta(PROMPT, (65,), finish_reason="stop"), End("done", Usage(1, 1))])
    length = int(encoder.headers[HEADER_LENGTH])
    assert encoder.headers["content-type"] == "application/octet-stream"
    head = json.loads(body[:length])
    (output,) = head["outputs"]
    assert output == {"name": "OUT", "datatype": "BYTES", "shape": [1],
                      "parameters": {"binary_data_size": len(body) - length}}  # fmt: skip
    assert body[length:] == binary_text(PROMPT)
    assert head["id"] == "seven"
