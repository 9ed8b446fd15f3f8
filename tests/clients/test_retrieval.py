"""Clients of applications with retrieval: LlamaIndex, LangChain, Cohere's, Jina's and Hugging Face's, and what Open
WebUI sends. The embeddings are those of a real model; the scripted model ranks, so that each score is known."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from tests.api.process import Server
from tests.clients.installed import environment, run_script

from tailrace.text import Tokenizer
from tailrace_outer.scripted.scripted_engine import tokenizer_json
from tailrace_outer.scripted.scripted_vectors import scripted_vector

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]  # the first test of each set has it installed

LLAMA_INDEX = (
    "llama-index-embeddings-openai-like==0.4.0",
    "llama-index-embeddings-ollama==0.10.0",
    "llama-index-embeddings-text-embeddings-inference==0.6.0",
    "llama-index-postprocessor-jinaai-rerank==0.6.0",
)
LANGCHAIN = ("langchain-ollama==1.1.0", "langchain-cohere==0.6.0")  # with Cohere's own client
TEXTS = ["The river runs over stones.", "The dog sleeps near the water."]
QUERY = "Where does the dog sleep?"
SETS = {
    "llama_index_openai": LLAMA_INDEX, "llama_index_ollama": LLAMA_INDEX, "llama_index_tei": LLAMA_INDEX,
    "llama_index_jina": LLAMA_INDEX, "langchain_ollama": LANGCHAIN, "cohere_rerank": LANGCHAIN,
    "langchain_cohere": LANGCHAIN,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--model", "embed=minilm", "--model", "rank=scripted:ranks=1", "--load", "all")
    with contextlib.closing(Server("scripted", *flags)) as running:
        yield running.wait_ready(timeout_s=280)


@pytest.fixture(scope="module")
def vectors(server: Server) -> list[list[float]]:
    """Return those of the texts and the question."""
    answer = server.post("/v1/embeddings", {"model": "embed", "input": [*TEXTS, QUERY]}).json()
    return [one["embedding"] for one in answer["data"]]


def _ranking() -> list[Any]:  # Any: approximate numbers
    """Return the index and the score of each text, the best one first."""
    tokenizer = Tokenizer.from_json(tokenizer_json())
    prompts = [f"<|query|>{QUERY}\n<|document|>{text}\n<|assistant|>" for text in TEXTS]
    raw = [scripted_vector(tuple(tokenizer.encode(prompt, special=True)), 1)[0] for prompt in prompts]
    scores = [float(1 / (1 + np.exp(-score))) for score in raw]
    return [[index, pytest.approx(scores[index], abs=1e-6)] for index in sorted(range(2), key=lambda one: -scores[one])]


def _outcome(case: str, server: Server) -> Any:  # Any: JSON
    script = Path(__file__).parent / "scripts" / "rag_outcomes.py"
    name = "llama-index" if SETS[case] is LLAMA_INDEX else "langchain-rag"
    (outcome,) = run_script(environment(name, *SETS[case]), script, case=case, url=server.url)
    return outcome


@pytest.mark.parametrize("case", ["llama_index_openai", "llama_index_ollama", "llama_index_tei", "langchain_ollama"])
def test_frameworks_embed(server: Server, vectors: list[list[float]], case: str) -> None:
    assert _outcome(case, server) == [pytest.approx(vector, abs=1e-5) for vector in vectors]


@pytest.mark.parametrize("case", ["cohere_rerank", "langchain_cohere", "llama_index_jina"])
def test_frameworks_rank(server: Server, case: str) -> None:
    found = _outcome(case, server)
    assert found == [_ranking()] * (2 if case == "cohere_rerank" else 1)  # both versions of Cohere's client


def test_hugging_face(server: Server, vectors: list[list[float]]) -> None:
    with InferenceClient(f"{server.url}/embed") as client:
        found = client.feature_extraction([*TEXTS, QUERY], normalize=True, truncate=True, truncation_direction="right")
    np.testing.assert_allclose(found, vectors, atol=1e-5)
    with InferenceClient(f"{server.url}/similarity") as client:
        similar = client.sentence_similarity(QUERY, other_sentences=TEXTS)
    river, dog, question = np.array(vectors)
    np.testing.assert_allclose(similar, [river @ question, dog @ question], atol=1e-5)


def test_open_webui(server: Server, vectors: list[list[float]]) -> None:
    """Its requests, with "openai" and "ollama" as embedding engine and "external" as reranking engine. Source:
    open_webui/retrieval/utils.py and models/external.py."""
    names = {"X-OpenWebUI-User-Name": "Me", "X-OpenWebUI-User-Id": "1", "Authorization": "Bearer unused"}
    expected = [pytest.approx(vector, abs=1e-5) for vector in vectors]
    asked = {"input": [*TEXTS, QUERY], "model": "embed", "input_type": "search_document"}  # the prefix's field
    data = server.http.post("/v1/embeddings", json=asked, headers=names).json()["data"]
    assert [one["embedding"] for one in data] == expected
    own = server.http.post("/api/embed", json={"input": [*TEXTS, QUERY], "model": "embed"}, headers=names).json()
    assert own["embeddings"] == expected
    ranking = {"model": "rank", "query": QUERY, "documents": TEXTS, "top_n": 2}
    results = server.http.post("/v1/rerank", json=ranking, headers=names).json()["results"]
    assert [[one["index"], one["relevance_score"]] for one in results] == _ranking()
