"""Requests for vectors while engines die: each is answered once, with its own vectors."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Iterator

import httpx
import numpy as np
import psutil
import pytest
from tests.api.process import Server
from tests.waiting import until

from tailrace.text import Tokenizer
from tailrace_outer.scripted.scripted_engine import tokenizer_json
from tailrace_outer.scripted.scripted_vectors import scripted_vector

pytestmark = pytest.mark.timeout(120)

_SIZE = 16
_TEXTS = [[f"Text {number} of request {request}. " * 8 for number in range(3)] for request in range(100)]


@pytest.fixture
def server() -> Iterator[Server]:
    with contextlib.closing(Server(f"scripted:embeds={_SIZE},prefill_tokens_per_s=60000")) as running:
        yield running.wait_ready()


def _expected(text: str) -> list[float]:
    vector = scripted_vector(tuple(text.encode()), _SIZE)
    return list(map(float, vector / np.linalg.norm(vector)))


async def _ask(client: httpx.AsyncClient, texts: list[str]) -> httpx.Response:
    return await client.post("/v1/embeddings", json={"input": texts})


def _worker(server: Server) -> psutil.Process:
    (worker,) = (
        child for child in psutil.Process(server.process.pid).children() if "worker" in " ".join(child.cmdline())
    )
    return worker


def _count(server: Server, name: str) -> float:
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (.*)$", server.http.get("/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])


@pytest.mark.deep
async def test_a_hundred_requests_survive_two_engines(server: Server) -> None:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=server.url, timeout=100, limits=limits, trust_env=False) as client:
        asked = [asyncio.create_task(_ask(client, texts)) for texts in _TEXTS]
        for share in (0.2, 0.6):
            while sum(one.done() for one in asked) < share * len(asked):
                await asyncio.sleep(0.01)
            assert not all(one.done() for one in asked)
            killed = _worker(server)
            killed.kill()
            await asyncio.to_thread(killed.wait)
        answers = await asyncio.gather(*asked)
    assert Counter(answer.status_code for answer in answers) == {200: 100}
    for answer, texts in zip(answers, _TEXTS, strict=True):
        data = answer.json()["data"]
        assert [one["index"] for one in data] == [0, 1, 2]
        for one, text in zip(data, texts, strict=True):
            assert one["embedding"] == pytest.approx(_expected(text), abs=1e-6)
        assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, texts))
    until(lambda: server.log.count("Another engine is ready") == 2)
    until(lambda: _count(server, "tailrace_requests_running") == 0)


@pytest.mark.parametrize("control", ["<|crash|>", pytest.param("<|stall|>", marks=pytest.mark.deep)])
async def test_a_text_that_kills_engines_is_refused(control: str) -> None:
    """It is found by one more engine, among the texts of others, which all are answered. Then it is refused, also
    beside another text."""
    with contextlib.closing(Server(f"scripted:embeds={_SIZE},prefill_tokens_per_s=20000", "--stall-s", "1")) as server:
        server.wait_ready()
        async with httpx.AsyncClient(base_url=server.url, timeout=100, trust_env=False) as client:
            others = [asyncio.create_task(_ask(client, texts)) for texts in _TEXTS[:20]]
            answer = await _ask(client, ["Hi", control])
            assert (answer.status_code, answer.json()["error"]["code"]) == (422, "poison_request")
            assert "Input 1, counted from 0, has stopped the engine" in answer.text
            answers = await asyncio.gather(*others)
            assert Counter(one.status_code for one in answers) == {200: 20}
            for one, texts in zip(answers, _TEXTS, strict=False):
                found = [entry["embedding"] for entry in one.json()["data"]]
                assert found == [pytest.approx(_expected(text), abs=1e-6) for text in texts]
            assert server.log.count("Starting another engine") == 2
            again = await _ask(client, [control, "Something else."])
            assert (again.status_code, again.json()["error"]["code"]) == (422, "poison_request")
            after = await _ask(client, ["Hi"])
            assert after.json()["data"][0]["embedding"] == pytest.approx(_expected("Hi"), abs=1e-6)
            assert server.log.count("Starting another engine") == 2


def test_a_model_ranks_with_its_chat_template() -> None:
    tokenizer = Tokenizer.from_json(tokenizer_json())
    with contextlib.closing(Server("scripted:ranks=1")) as server:
        server.wait_ready()
        answer = server.post("/v1/rerank", {"query": "Q", "documents": ["a", "b"]}).json()
    prompts = [f"<|query|>Q\n<|document|>{text}\n<|assistant|>" for text in "ab"]
    raw = [scripted_vector(tuple(tokenizer.encode(prompt, special=True)), 1)[0] for prompt in prompts]
    scores = [1 / (1 + np.exp(-score)) for score in raw]
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert [found[0], found[1]] == pytest.approx(scores, abs=1e-6)
