"""tei-client, which reads /info of Text Embeddings Inference before it asks for anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.api.process import Server
from tests.clients.installed import run_python

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

_SCRIPT = Path(__file__).parent / "scripts" / "tei_client_outcomes.py"
_TEXTS = ["The river runs over stones.", "The dog sleeps near the water."]


def test_it_embeds(serve: Callable[..., Server]) -> None:
    server = serve("scripted:embeds=8")
    data = server.post("/v1/embeddings", {"input": _TEXTS}).json()["data"]
    expected = [pytest.approx(one["embedding"], abs=1e-5) for one in data]
    found, later, pooling = run_python("tei-client==0.2.4", _SCRIPT, url=server.url, task="embed", texts=_TEXTS)
    assert found == later == expected
    assert pooling == "mean"


def test_it_ranks(serve: Callable[..., Server]) -> None:
    server = serve("scripted:ranks=1")
    query = "Where does the dog sleep?"
    results = server.post("/v1/rerank", {"query": query, "documents": _TEXTS}).json()["results"]
    expected = [[one["index"], pytest.approx(one["relevance_score"], abs=1e-5)] for one in results]
    found, labels = run_python("tei-client==0.2.4", _SCRIPT, url=server.url, task="rank", query=query, texts=_TEXTS)
    assert found == expected
    assert labels == {"0": "LABEL_0"}
