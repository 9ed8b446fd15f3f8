"""Embeddings and rankings on the wires of Ollama, Text Embeddings Inference, llama.cpp's server, Jina and Cohere."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest
from tests.api.process import Server
from tests.missing import needs

from tailrace.models import CATALOGUE, NoProgress
from tailrace.models.fetch import fetch

pytestmark = [pytest.mark.timeout(300), needs("torch", "transformers")]

QUERY, TEXTS = "Where does the dog sleep?", ["Mills turn slowly.", "The dog sleeps near the water.", "Songs"]
RANK = {"query": QUERY, "documents": TEXTS}
TEI_RANK = {"query": QUERY, "texts": TEXTS}


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with random weights that scores pairs. No package has a real one."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("ranker")
    more: dict[str, Any] = {"num_labels": 1, "max_position_embeddings": 32, "initializer_range": 0.3}
    more |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    BertForSequenceClassification(BertConfig(**more)).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(fetch(CATALOGUE["minilm"], NoProgress()) / name, path)
    return path


@pytest.fixture(scope="module")
def server(ranker: Path) -> Iterator[Server]:
    flags = ("--model", "embed=minilm", "--model", f"rank={ranker}", "--load", "all")
    with contextlib.closing(Server("scripted", *flags)) as running:
        yield running.wait_ready(timeout_s=280)


@pytest.fixture(scope="module")
def scores(ranker: Path) -> list[float]:
    """Return transformers' own scores."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ranker)
    model: Any = AutoModelForSequenceClassification.from_pretrained(ranker).eval()  # Any: transformers' model
    read = tokenizer([QUERY] * len(TEXTS), TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return list(map(float, model(**read).logits[:, 0]))


def _answer(server: Server, path: str, body: dict[str, Any]) -> Any:  # Any: of JSON
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _openai(server: Server, text: str) -> list[float]:
    return list(_answer(server, "/v1/embeddings", {"input": text})["data"][0]["embedding"])


def test_ollama(server: Server) -> None:
    found = _answer(server, "/api/embed", {"model": "embed:latest", "input": TEXTS})
    assert found["model"] == "embed:latest"
    assert found["embeddings"] == [pytest.approx(_openai(server, text), abs=1e-5) for text in TEXTS]
    assert found["prompt_eval_count"] == 18
    assert found["total_duration"] >= found["load_duration"] >= 0
    assert _answer(server, "/api/embeddings", {"model": "embed", "prompt": TEXTS[0]}) == {
        "embedding": pytest.approx(_openai(server, TEXTS[0]), abs=1e-5)
    }
    assert _answer(server, "/api/embed", {"model": "embed", "input": ""})["embeddings"] == []
    assert _answer(server, "/api/embeddings", {"model": "embed"}) == {"embedding": []}


def test_ollama_cuts_what_is_too_long(server: Server) -> None:
    long, cut = "word " * 400, "word " * 254
    found = _answer(server, "/api/embed", {"model": "embed", "input": long})
    assert found["prompt_eval_count"] == 256
    assert found["embeddings"][0] == pytest.approx(_openai(server, cut), abs=1e-5)
    answer = server.post("/api/embed", {"model": "embed", "input": long, "truncate": False})
    assert answer.status_code == 400
    assert "exceeds the context length" in answer.json()["error"]


def test_ollama_says_what_a_model_can_do(server: Server) -> None:
    shown = _answer(server, "/api/show", {"model": "embed"})
    assert shown["capabilities"] == ["embedding"]
    assert shown["model_info"]["bert.embedding_length"] == 384
    assert (shown["details"]["family"], shown["details"]["format"]) == ("bert", "safetensors")
    assert _answer(server, "/api/show", {"model": "rank"})["capabilities"] == ["rerank"]


def test_text_embeddings_inference(server: Server) -> None:
    expected = [pytest.approx(_openai(server, text), abs=1e-5) for text in TEXTS]
    assert _answer(server, "/embed", {"inputs": TEXTS}) == expected
    assert _answer(server, "/embed", {"inputs": TEXTS[0]}) == expected[:1]
    (raw,) = _answer(server, "/embed", {"inputs": TEXTS[0], "normalize": False})
    assert math.hypot(*raw) > 1.5
    assert [value / math.hypot(*raw) for value in raw] == expected[0]
    answer = server.post("/embed", {"inputs": "word " * 400})
    assert answer.status_code == 413
    assert answer.json()["error_type"] == "validation"
    begin = _answer(server, "/embed", {"inputs": "river " * 254 + "word " * 400, "truncate": True})
    assert begin[0] == pytest.approx(_openai(server, "river " * 254), abs=1e-5)
    left = {"inputs": "river " * 254 + "word " * 400, "truncate": True, "truncation_direction": "Left"}
    assert _answer(server, "/embed", left)[0] == pytest.approx(_openai(server, "word " * 254), abs=1e-5)
    faulty: list[dict[str, Any]] = [
        {"inputs": []}, {"inputs": ["a", 1]}, {"inputs": "x", "prompt_name": "query"}, {}, {"inputs": 5},
    ]  # fmt: skip
    for body in faulty:
        answer = server.post("/embed", body)
        assert answer.status_code == 422, answer.text
        assert answer.json()["error_type"] == "validation"


def test_text_embeddings_inference_shows_tokens(server: Server) -> None:
    """Those of the model that makes vectors, with what its tokenizer adds."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fetch(CATALOGUE["minilm"], NoProgress()))
    for asked, added in (({}, True), ({"add_special_tokens": False}, False)):
        shown = _answer(server, "/tokenize", {"inputs": TEXTS, **asked})
        assert [[token["id"] for token in tokens] for tokens in shown] == [
            tokenizer(text, add_special_tokens=added)["input_ids"] for text in TEXTS
        ]
        names = [token["text"] for token in shown[2]]
        assert names == (["[CLS]", "Songs", "[SEP]"] if added else ["Songs"])
        assert [token["special"] for token in shown[2]] == ([True, False, True] if added else [False])
    assert isinstance(_answer(server, "/tokenize", {"inputs": "Songs"})[0], dict)  # TGI's form, of the first model


def test_text_embeddings_inference_compares(server: Server) -> None:
    first, *others = (np.array(_openai(server, text)) for text in (QUERY, *TEXTS))
    asked: dict[str, Any] = {"inputs": {"source_sentence": QUERY, "sentences": TEXTS}}
    assert _answer(server, "/similarity", asked) == [pytest.approx(float(first @ one), abs=1e-5) for one in others]
    long = {"inputs": {"source_sentence": QUERY, "sentences": ["word " * 400]}}
    assert server.post("/similarity", long).status_code == 413
    assert len(_answer(server, "/similarity", {**long, "parameters": {"truncate": True}})) == 1
    for body in ({}, {"inputs": QUERY}, {"inputs": {"source_sentence": QUERY, "sentences": []}}):
        assert server.post("/similarity", body).status_code == 422


def test_text_embeddings_inference_ranks(server: Server, scores: list[float]) -> None:
    order = sorted(range(len(TEXTS)), key=lambda index: -scores[index])
    found = _answer(server, "/rerank", {**TEI_RANK, "raw_scores": True, "return_text": True})
    assert found == [
        {"index": index, "score": pytest.approx(scores[index], abs=1e-4), "text": TEXTS[index]} for index in order
    ]
    plain = _answer(server, "/rerank", TEI_RANK)
    sigmoids = [1 / (1 + math.exp(-scores[index])) for index in order]
    assert [one["score"] for one in plain] == pytest.approx(sigmoids, abs=1e-4)
    for body in ({"query": QUERY, "texts": []}, {"texts": TEXTS}, {"query": 5, "texts": TEXTS}):
        assert server.post("/rerank", body).status_code == 422
    assert server.post("/rerank", {"query": "word " * 40, "texts": TEXTS}).status_code == 413


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
def test_llama_server(server: Server, path: str) -> None:
    expected = [pytest.approx(_openai(server, text), abs=1e-5) for text in TEXTS]
    whole = [{"index": index, "embedding": [one]} for index, one in enumerate(expected)]
    assert _answer(server, path, {"content": TEXTS[0]}) == whole[:1]
    assert _answer(server, path, {"content": TEXTS, "model": "embed"}) == whole
    assert _answer(server, path, {"input": TEXTS[0], "embd_normalize": 2}) == whole[:1]
    for norm, length in ((1, 1.0), (3, 1.0)):
        ((one,),) = (answer["embedding"] for answer in _answer(server, path, {"content": "Hi", "embd_normalize": norm}))
        assert sum(abs(number) ** norm for number in one) == pytest.approx(length, abs=1e-5)
        assert [number / math.hypot(*one) for number in one] == pytest.approx(_openai(server, "Hi"), abs=1e-5)
    ((largest,),) = (one["embedding"] for one in _answer(server, path, {"content": "Hi", "embd_normalize": 0}))
    assert max(map(abs, largest)) == pytest.approx(32_760)
    ((raw,),) = (one["embedding"] for one in _answer(server, path, {"content": "Hi", "embd_normalize": -1}))
    assert math.hypot(*raw) > 1.5
    faulty: list[dict[str, Any]] = [
        {}, {"content": []}, {"content": 5}, {"content": ["a", 1]}, {"content": "Hi", "embd_normalize": -2},
    ]  # fmt: skip
    for body in faulty:
        refused = server.post(path, body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_jina_and_cohere(server: Server, scores: list[float], path: str) -> None:
    order = sorted(range(len(TEXTS)), key=lambda index: -scores[index])
    found = _answer(server, path, {"model": "rank", **RANK, "top_n": 2, "return_documents": True})
    assert [one["index"] for one in found["results"]] == order[:2]
    assert found["results"][0]["document"] == {"text": TEXTS[order[0]]}
    assert found["results"][0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(-scores[order[0]])), abs=1e-4)
    assert found["usage"]["total_tokens"] > 18
    objects = [{"text": text} for text in TEXTS]
    again = _answer(server, path, {**RANK, "documents": objects})
    assert [one["index"] for one in again["results"]] == order
    assert "document" not in again["results"][0]
    long = server.post(path, {"query": QUERY, "documents": ["word " * 100, *TEXTS]})
    assert len(long.json()["results"]) == 4
    assert long.headers["x-tailrace-ignored"].endswith("s (cut to 32 tokens)")  # documents, or TEI's word: inputs
    status = 422 if path == "/rerank" else 400  # as text-embeddings-inference has it
    for body in ({"query": QUERY}, {**RANK, "documents": []}, {**RANK, "top_n": -1}, {**RANK, "query": None}):
        assert server.post(path, body).status_code == status
    refused = server.post(path, {**RANK, "model": "embed"})
    assert refused.status_code == status
    assert "cannot rank documents" in refused.text


async def test_unmodified_clients(server: Server) -> None:
    expected = [pytest.approx(_openai(server, text), abs=1e-5) for text in TEXTS]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        made = await client.embeddings.create(model="embed", input=TEXTS)  # asks for base64
        assert [one.embedding for one in made.data] == expected
        assert made.usage.prompt_tokens == 18
        with pytest.raises(openai.BadRequestError) as caught:
            # LangChain sends ids of OpenAI's tokenizer, unless it has check_embedding_ctx_length=False.
            await client.embeddings.create(model="embed", input=[[791, 15140, 8640, 927, 27302, 13]], dimensions=3)
        assert caught.value.param == "dimensions"
        with pytest.raises(openai.BadRequestError, match="ids of this model's tokenizer"):
            await client.embeddings.create(model="embed", input=[[791, 15140, 86400, 927]])
    with ollama.Client(server.url) as theirs:
        assert [list(one) for one in theirs.embed("embed", TEXTS).embeddings] == expected
        assert list(theirs.embeddings("embed", TEXTS[0]).embedding) == expected[0]
