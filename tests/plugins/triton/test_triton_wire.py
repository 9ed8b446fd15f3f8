"""The wire of Triton, KServe and Inferless: requests and answers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from tests.dialects.fake_server import FakeServer, parsed, prompt_of, view_of

from tailrace.dialects import GenerateCall, ParsedRequest
from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.wire import Generate, Show
from tailrace.errors import QueueFull, RequestError, UnknownModel, UnsupportedMediaType
from tailrace.types import Message, Sampling
from tailrace_plugins.triton import triton_wire as triton
from tailrace_plugins.triton.triton_wire import TritonView, encode_error

BARE = FakeServer(can_chat=False)
GREEDY = Sampling(temperature=0.0, repetition_penalty=1.1)


def tensor(name: str, value: object, datatype: str = "BYTES", **more: object) -> JsonBody:
    return {"name": name, "shape": [1], "datatype": datatype, "data": [value], **more}


def call_of(
    body: JsonBody, parse: Callable[[ParsedRequest], GenerateCall] = triton.parse_generate, *, server: FakeServer = BARE
) -> GenerateCall:
    return parse(parsed(body, path={"model": "scripted"}, server=server))


def test_what_a_model_recommends_does_not_change_this_wires_defaults() -> None:
    server = FakeServer(can_chat=False, recommended_sampling={"top_k": 20, "temperature": 0.6})
    assert call_of({"text_input": "Hi"}, server=server).request.sampling == GREEDY
    assert call_of({"text_input": "Hi", "temperature": 0.7}, server=server).request.sampling == Sampling(
        temperature=0.7
    )


def infer(*tensors: JsonBody, **more: object) -> GenerateCall:
    return call_of({"inputs": list(tensors), **more}, triton.parse_infer)


def shown(path: str, *, model: str = "scripted", version: str = "", server: FakeServer = BARE) -> JsonBody:
    (act,) = [operation.act for operation in triton.WIRE.operations if operation.path == path]
    assert isinstance(act, Show)
    names = {"model": model} | ({"version": version} if version else {})
    found: JsonBody = json.loads(act.render(parsed(path=names, server=server)).body)
    return found


@pytest.mark.parametrize(
    ("name", "output"), [("TEXT", "OUT"), ("text_input", "text_output"), ("prompt", "generated_text")]
)
def test_three_equivalent_bodies(name: str, output: str) -> None:
    bodies: list[JsonBody] = [
        {name: "Hi", "max_tokens": 5},
        {"parameters": {name: "Hi", "max_tokens": 5}},
        {name: "Hi", "parameters": {"max_tokens": 5}},
        {"inputs": [tensor(name, "Hi"), tensor("max_tokens", 5, "INT32")]},
        {"inputs": [tensor(name, "Hi")], "parameters": {"max_tokens": 5}},
    ]
    for parse in (triton.parse_generate, triton.parse_infer, triton.parse_stream):
        for body in bodies:
            call = call_of(body, parse)
            assert prompt_of(call.request) == "Hi"
            assert call.request.sampling == Sampling(temperature=0.0, repetition_penalty=1.1, max_tokens=5)
            assert view_of(call) == TritonView(output, is_tensor=parse is triton.parse_infer)
            assert call.stream == (parse is triton.parse_stream)


def test_a_bare_prompt_is_a_chats_turn_where_the_model_can_chat() -> None:
    assert call_of({"TEXT": "Hi"}, server=FakeServer()).request.messages == (Message("user", "Hi"),)
    templated = FakeServer(prompt_template="<{prompt}>")
    assert prompt_of(call_of({"TEXT": "Hi"}, server=templated).request) == "<Hi>"


def test_sampling_is_greedy_by_default() -> None:
    assert call_of({"TEXT": "Hi"}).request.sampling == GREEDY
    assert call_of({"TEXT": "Hi", "stop": "x"}).request.sampling.temperature == 0
    assert call_of({"TEXT": "Hi", "top_p": 0.5}).request.sampling == Sampling(top_p=0.5)


def test_parameters_as_tensors_of_any_kind() -> None:
    call = infer(
        tensor("prompt", "Hi", "STRING"),
        tensor("temperature", 1, "FP32"),
        tensor("top_k", 5.0, "FP64"),
        tensor("top_p", 0.25, "FP16"),
        tensor("seed", -3, "INT64"),
        tensor("max_new_tokens", 7, "UINT8"),
        tensor("ignore_eos", True, "BOOL"),
        tensor("stop", "x"),
    )
    assert call.request.sampling == Sampling(
        temperature=1.0, top_k=5, top_p=0.25, seed=-3, max_tokens=7, ignore_eos=True, stop=("x",)
    )


@pytest.mark.parametrize(("words", "expected"), [("", ()), ([""], ()), ("x", ("x",)), (["x", "y"], ("x", "y"))])
def test_stop_words(words: object, expected: tuple[str, ...]) -> None:
    assert call_of({"text_input": "Hi", "stop_words": words}).request.sampling.stop == expected


def test_a_batch_of_one_is_answered_as_such() -> None:
    for data in (["Hi"], [["Hi"]]):
        call = infer({"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": data})
        assert view_of(call) == TritonView("OUT", is_tensor=True, shape=(1, 1))


def test_a_request_may_have_an_id() -> None:
    assert view_of(infer(tensor("TEXT", "Hi"), id="7")) == TritonView("OUT", is_tensor=True, request_id="7")
    with pytest.raises(RequestError):
        infer(tensor("TEXT", "Hi"), id="x" * 1000)


def test_the_output_may_be_asked_for() -> None:
    infer(tensor("TEXT", "Hi"), outputs=[{"name": "OUT", "parameters": {"binary_data": False}}])
    with pytest.raises(RequestError, match="The only output is OUT"):
        infer(tensor("TEXT", "Hi"), outputs=[{"name": "text_output"}])


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("BYTES", 5),
        ("BYTES", None),
        ("STRING", True),
        ("BOOL", 1),
        ("BOOL", "true"),
        ("INT8", 128),
        ("INT8", -129),
        ("INT16", 2**15),
        ("UINT8", -1),
        ("UINT64", 2**64),
        ("INT64", 2**63),
        ("INT32", 1.0),
        ("INT32", True),
        ("INT32", "1"),
        ("FP32", "1"),
        ("FP32", True),
        ("FP32", [1]),
        ("INT", 1),
        ("JSON", {}),
        ("", "Hi"),
    ],
)
def test_a_value_must_be_of_its_datatype(datatype: str, value: object) -> None:
    with pytest.raises(RequestError, match=r"inputs\[1\]: its data must be one value of its datatype"):
        infer(tensor("TEXT", "Hi"), tensor("anything", value, datatype))


@pytest.mark.parametrize(
    ("shape", "data"), [([], ["Hi"]), ([2], ["Hi", "Ho"]), ([-1], ["Hi"]), ([1, 1, 1], [[["Hi"]]])]
)
def test_a_shape_must_be_of_one_element(shape: list[int], data: list[object]) -> None:
    with pytest.raises(RequestError, match="shape"):
        infer({"name": "TEXT", "shape": shape, "datatype": "BYTES", "data": data})


@pytest.mark.parametrize(("shape", "data"), [([1], []), ([1], ["Hi", "Ho"]), ([1], [["Hi"]]), ([1, 1], [[["Hi"]]])])
def test_data_must_be_of_its_shape(shape: list[int], data: list[object]) -> None:
    with pytest.raises(RequestError, match="data"):
        infer({"name": "TEXT", "shape": shape, "datatype": "BYTES", "data": data})


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"max_tokens": 5},
        {"TEXT": "Hi", "prompt": "Ho"},
        {"TEXT": ""},
        {"TEXT": 5},
        {"TEXT": ["Hi"]},
        {"parameters": 5},
        {"parameters": {"TEXT": "Hi", "max_tokens": "5"}},
        {"inputs": 5},
        {"inputs": []},
        {"inputs": None},
        {"inputs": [5]},
        {"inputs": [{"name": "TEXT"}]},
        {"inputs": [tensor("TEXT", "Hi"), tensor("TEXT", "Ho")]},
        {"inputs": [tensor("TEXT", "Hi")], "parameters": {"TEXT": "Ho"}},
        {"inputs": [tensor("TEXT", "Hi"), tensor("max_tokens", 0, "INT32")]},
        {"inputs": [tensor("TEXT", "Hi"), tensor("temperature", -1.0, "FP32")]},
    ],
    ids=str,
)
def test_wrong_bodies_are_refused(body: JsonBody) -> None:
    for parse in (triton.parse_infer, triton.parse_generate, triton.parse_stream):
        with pytest.raises(RequestError):
            call_of(body, parse)


def test_stream_must_agree_with_the_path() -> None:
    call_of({"TEXT": "Hi", "stream": False})
    call_of({"TEXT": "Hi", "stream": True}, triton.parse_stream)
    for body, parse in ((True, triton.parse_generate), (False, triton.parse_stream)):
        with pytest.raises(RequestError, match="generate_stream"):
            call_of({"TEXT": "Hi", "stream": body}, parse)


def test_neutral_values_are_accepted() -> None:
    given = {"bad_words": [""], "stop_words": "", "exclude_input_in_output": True, "beam_width": 1, "sequence_id": 0}
    assert call_of({"text_input": "Hi", **given}) == call_of({"text_input": "Hi"})


def test_unknown_fields_are_named() -> None:
    assert call_of({"TEXT": "Hi", "do_sample": True}).ignored == ("do_sample",)
    call = infer(tensor("TEXT", "Hi", other=1), tensor("voice", "af_bella"), parameters={"binary_data_output": True})
    assert call.ignored == ("inputs[].other", "voice")


WORKSPACE = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("served", "asked_for"),
    [
        ("scripted", "scripted"),
        ("scripted", "default"),
        ("scripted", f"scripted_{WORKSPACE}"),
        ("org/name", "name"),
        ("org/name", f"name_{WORKSPACE}"),
    ],
)
def test_names_of_the_model(served: str, asked_for: str) -> None:
    server = FakeServer(model=served)
    triton.parse_infer(parsed({"TEXT": "Hi"}, path={"model": asked_for, "version": "1"}, server=server))
    assert shown("/v2/models/{model}/ready", model=asked_for, server=server) == {"name": served, "ready": True}


@pytest.mark.parametrize(
    "path",
    [
        {"model": "other"},
        {"model": f"other_{WORKSPACE}"},
        {"model": f"scripted_{WORKSPACE[1:]}"},
        {"model": ""},
        {"model": "scripted", "version": "2"},
        {"model": "scripted", "version": ""},
    ],
)
def test_other_models_and_versions_are_unknown(path: dict[str, str]) -> None:
    for operation in triton.WIRE.operations:
        if "{model}" in operation.path:
            act = operation.act
            assert isinstance(act, Generate | Show)
            with pytest.raises(UnknownModel):
                (act.parse if isinstance(act, Generate) else act.render)(parsed({"TEXT": "Hi"}, path=path))


def test_every_path_is_there_with_a_version() -> None:
    paths = {operation.path for operation in triton.WIRE.operations if "{model}" in operation.path}
    plain = {path for path in paths if "{version}" not in path}
    assert paths - plain == {path.replace("{model}", "{model}/versions/{version}") for path in plain}


def test_facts_about_server_and_model() -> None:
    assert shown("/v2")["name"] == "tailrace"
    assert shown("/v2/health/live") == {"live": True}
    assert shown("/v2/health/ready") == {"ready": True}
    model = shown("/v2/models/{model}/versions/{version}", version="1")
    assert (model["name"], model["versions"]) == ("scripted", ["1"])
    assert {"name": "TEXT", "datatype": "BYTES", "shape": [1]} in model["inputs"]
    assert [output["name"] for output in model["outputs"]] == ["OUT", "text_output", "generated_text"]
    assert shown("/v2/models/{model}/config")["model_transaction_policy"] == {"decoupled": True}


def test_a_server_that_is_not_ready_answers_503() -> None:
    for path in ("/v2/health/ready", "/v2/models/{model}/ready"):
        (act,) = [operation.act for operation in triton.WIRE.operations if operation.path == path]
        assert isinstance(act, Show)
        reply = act.render(parsed(path={"model": "scripted"}, server=FakeServer(is_ready=False)))
        assert (reply.status, json.loads(reply.body)["ready"], reply.retry_after_s) == (503, False, 1.0)
    assert shown("/v2/health/live", server=FakeServer(is_ready=False)) == {"live": True}


def test_bodies_may_come_without_a_type_but_not_with_another() -> None:
    triton.check_headers({})
    triton.check_headers({"content-type": "application/json; charset=utf-8"})
    form = {"content-type": "application/x-www-form-urlencoded"}
    triton.check_headers(form)  # as curl has it
    for headers in (
        {"content-type": "text/plain"},
        {"content-type": "application/octet-stream"},
        form | {"origin": "http://page.test"},
        form | {"sec-fetch-site": "cross-site"},
    ):
        with pytest.raises(UnsupportedMediaType):
            triton.check_headers(headers)


def test_errors() -> None:
    assert encode_error(RequestError("No.")) == (400, b'{"error":"No."}')
    assert encode_error(UnknownModel("No."))[0] == 404
    assert encode_error(QueueFull("No."))[0] == 429
