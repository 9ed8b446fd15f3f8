"""The wire of Text Embeddings Inference: the bytes of its documented API, and a server with its routes.

Source: TEI's OpenAPI document, huggingface.github.io/text-embeddings-inference.
"""

from __future__ import annotations

import contextlib
import json
import math
from array import array
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.api.process import Server
from tests.dialects.fake_server import parsed

from tailrace.dialects import JsonBody, ParsedRequest, VectorCall
from tailrace.errors import (
    ContextLengthExceeded,
    EngineLost,
    PoisonRequest,
    QueueFull,
    RequestError,
    TailraceError,
    UnknownModel,
    UnsupportedParameter,
)
from tailrace.types import VectorForm, Vectors
from tailrace_outer.scripted.scripted_vectors import scripted_vector
from tailrace_plugins.tei.tei_wire import WIRE, encode_error, parse_embed, parse_rerank, parse_similarity

_TEXTS = ["Deep learning is …", "cheese is made of"]
_SIZE = 4


def _vectors(*given: tuple[float, ...]) -> Vectors:
    return Vectors(tuple(array("f", one).tobytes() for one in given), (3,) * len(given), 0.0, 0.0)


def _embed(body: JsonBody) -> VectorCall:
    return parse_embed(parsed(body))


def _rerank(**more: object) -> VectorCall:
    return parse_rerank(parsed({"query": "What is deep learning?", "texts": _TEXTS, **more}))


# Requests


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("Hi", ("Hi",)),
        (["Hi", "Ho"], ("Hi", "Ho")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_inputs(inputs: object, expected: object) -> None:
    call = _embed({"inputs": inputs})
    assert (call.request.inputs, call.request.form, call.request.query, call.ignored) == (
        expected,
        VectorForm(),
        None,
        (),
    )


@pytest.mark.parametrize(
    ("given", "side"),
    [
        ({}, ""),
        ({"truncate": False, "truncation_direction": "Left"}, ""),
        ({"truncate": None}, ""),
        ({"truncate": True}, "end"),
        ({"truncate": True, "truncation_direction": "Right"}, "end"),
        ({"truncate": True, "truncation_direction": "Left"}, "start"),
        ({"truncate": True, "truncation_direction": "left"}, "start"),
    ],
)
def test_which_side_is_left_out(given: JsonBody, side: str) -> None:
    sentences = {"source_sentence": "Hi", "sentences": ["Ho"]}
    similar = parse_similarity(parsed({"inputs": sentences, "parameters": given}))
    assert {_embed({"inputs": "Hi", **given}).request.truncate, _rerank(**given).request.truncate} == {side}
    assert similar.request.truncate == side


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"normalize": True}, VectorForm()),
        ({"normalize": None, "dimensions": None}, VectorForm()),
        ({"normalize": False}, VectorForm(is_normalized=False)),
        ({"dimensions": 2}, VectorForm(num_dimensions=2)),
    ],
)
def test_the_form_of_vectors(given: JsonBody, form: VectorForm) -> None:
    assert _embed({"inputs": "Hi", **given}).request.form == form


def test_the_name_of_a_prompt_is_refused_unless_it_is_null() -> None:
    assert _embed({"inputs": "Hi", "prompt_name": None}).ignored == ()
    with pytest.raises(UnsupportedParameter, match="prompt_name"):
        _embed({"inputs": "Hi", "prompt_name": "query"})
    with pytest.raises(UnsupportedParameter, match="prompt_name"):
        _rerank(prompt_name="query")


@pytest.mark.parametrize(
    ("parse", "body", "param"),
    [
        (parse_embed, {"inputs": None}, "inputs"),
        (parse_embed, {"inputs": []}, "inputs"),
        (parse_embed, {"inputs": ["Hi", 1]}, "inputs"),
        (parse_embed, {"inputs": [[]]}, "inputs"),
        (parse_embed, {"inputs": "Hi", "dimensions": 0}, "dimensions"),
        (parse_embed, {"inputs": "Hi", "truncation_direction": "Up"}, "truncation_direction"),
        (parse_rerank, {"query": "Hi", "texts": "Hi"}, "texts"),
        (parse_rerank, {"query": "Hi", "texts": []}, "texts"),
        (parse_rerank, {"query": 1, "texts": ["Hi"]}, "query"),
        (parse_similarity, {"inputs": {"source_sentence": "Hi", "sentences": []}}, "inputs.sentences"),
    ],
)
def test_bad_fields_are_named(parse: Callable[[ParsedRequest], VectorCall], body: JsonBody, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(parsed(body))
    assert caught.value.param == param


# Answers


def test_embeddings_are_a_list_of_lists() -> None:
    assert _embed({"inputs": _TEXTS}).view.encode(_vectors((0.0, 1.0, 2.0), (0.5, -1.0, 0.0))) == (
        b"[[0.0,1.0,2.0],[0.5,-1.0,0.0]]"
    )


def test_similarities_are_a_list_of_cosines() -> None:
    call = parse_similarity(parsed({"inputs": {"source_sentence": "Hi", "sentences": ["Ho", "He", "Ha"]}}))
    assert call.request.inputs == ("Hi", "Ho", "He", "Ha")
    assert call.view.encode(_vectors((1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.5, 0.0))) == b"[0.0,1.0,0.5]"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, b'[{"index":1,"score":0.5},{"index":0,"score":0.25}]'),
        ({"raw_scores": False, "return_text": False}, b'[{"index":1,"score":0.5},{"index":0,"score":0.25}]'),
        ({"raw_scores": True}, b'[{"index":1,"score":0.0},{"index":0,"score":-1.0}]'),
        (
            {"raw_scores": True, "return_text": True},
            b'[{"index":1,"score":0.0,"text":"cheese is made of"},'
            b'{"index":0,"score":-1.0,"text":"Deep learning is \\u2026"}]',
        ),
    ],
)
def test_a_ranking_has_the_best_text_first(asked: JsonBody, expected: bytes) -> None:
    raw = -1.0 if asked.get("raw_scores") else -math.log(3)  # whose sigmoid is 1/4
    found = _rerank(**asked).view.encode(_vectors((raw,), (0.0,)))
    if asked.get("raw_scores"):
        assert found == expected
    else:
        rounded = [{**one, "score": round(one["score"], 6)} for one in json.loads(found)]
        assert rounded == json.loads(expected)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ContextLengthExceeded(9, 8), 413, "validation"),
        (RequestError("No."), 422, "validation"),
        (UnsupportedParameter("No."), 422, "validation"),
        (UnknownModel("No."), 404, "validation"),
        (PoisonRequest("No."), 424, "backend"),
        (EngineLost("No."), 424, "backend"),
        (QueueFull("No.", retry_after_s=1.0), 429, "overloaded"),
    ],
)
def test_errors(error: TailraceError, status: int, kind: str) -> None:
    found, body = encode_error(error)
    assert (found, json.loads(body)) == (status, {"error": error.message, "error_type": kind})
    assert body.startswith(b'{"error":')


def test_its_routes() -> None:
    assert [(one.method, one.path) for one in WIRE.operations] == [
        ("POST", "/embed"),
        ("POST", "/similarity"),
        ("POST", "/rerank"),
    ]


# A server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with a model that embeds, and one that ranks."""
    running = Server(f"scripted:embeds={_SIZE}", "--model", "ranker=scripted:ranks=1", "--context-tokens", "64")
    with contextlib.closing(running):
        yield running.wait_ready()


def _scripted(text: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return scripted_vector(tuple(text.encode()), _SIZE)


def test_a_text_is_embedded_as_it_is_or_with_length_1(server: Server) -> None:
    raw = server.post("/embed", {"inputs": "Hi", "normalize": False})
    assert raw.status_code == 200, raw.text
    assert raw.json() == [pytest.approx(_scripted("Hi").tolist())]
    (even,) = server.post("/embed", {"inputs": "Hi"}).json()
    assert even == pytest.approx((_scripted("Hi") / np.linalg.norm(_scripted("Hi"))).tolist())


@pytest.mark.parametrize(
    ("more", "kept"), [({"truncate": True}, "a" * 64), ({"truncate": True, "truncation_direction": "Left"}, "b" * 64)]
)
def test_a_long_text_is_cut_at_the_side_that_the_request_names(more: JsonBody, kept: str, server: Server) -> None:
    (found,) = server.post("/embed", {"inputs": "a" * 64 + "b" * 64, "normalize": False, **more}).json()
    assert found == pytest.approx(_scripted(kept).tolist())


def test_a_long_text_is_refused_by_default(server: Server) -> None:
    for path, body in (
        ("/embed", {"inputs": ["Hi", "a" * 65]}),
        ("/rerank", {"query": "Hi", "texts": ["a" * 65]}),
        ("/similarity", {"inputs": {"source_sentence": "a" * 65, "sentences": ["Hi"]}}),
    ):
        answer = server.post(path, body)
        assert (answer.status_code, answer.json()["error_type"]) == (413, "validation"), path
        assert "64" in answer.json()["error"]


def test_scores_are_those_of_the_model(server: Server) -> None:
    asked = {"query": "What?", "texts": _TEXTS}
    raw = {one["index"]: one["score"] for one in server.post("/rerank", {**asked, "raw_scores": True}).json()}
    even = server.post("/rerank", {**asked, "return_text": True}).json()
    assert [one["score"] for one in even] == sorted((one["score"] for one in even), reverse=True)
    for one in even:
        assert one["text"] == _TEXTS[one["index"]]
        assert one["score"] == pytest.approx(1 / (1 + math.exp(-raw[one["index"]])))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {}),
        ("/embed", {"inputs": 5}),
        ("/embed", {"inputs": ["Hi\0"]}),
        ("/embed", {"inputs": "Hi", "dimensions": 3}),
        ("/rerank", {"texts": ["Hi"]}),
    ],
)
def test_bad_requests_get_the_errors_of_tei(path: str, body: JsonBody, server: Server) -> None:
    answer = server.post(path, body)
    assert (answer.status_code, set(answer.json())) == (422, {"error", "error_type"})
    assert answer.json()["error_type"] == "validation"


def test_health_and_info(server: Server) -> None:
    assert server.http.get("/health").status_code == 200
    info = server.http.get("/info").json()
    assert info["model_id"] == "scripted"
    assert (info["model_type"], info["max_input_length"]) == ({"embedding": {"pooling": "mean"}}, 64)
    assert (info["max_concurrent_requests"], info["max_client_batch_size"]) == (128, 2048)
    assert not {"model_pipeline_tag", "max_total_tokens"} & set(info)
