"""Embeddings of a real model over HTTP: equal to transformers' own, with owners, limits, records and faults."""

from __future__ import annotations

import array
import asyncio
import base64
import contextlib
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
from tests.api.keyed import serving_with_keys
from tests.api.process import Server
from tests.missing import needs, skip_missing
from tests.waiting import until

from tailrace.access.quota import Quota
from tailrace.models import CATALOGUE, NoProgress
from tailrace.models.fetch import fetch

pytestmark = pytest.mark.timeout(300)  # the first run fetches 84 MB

PATH = "/v1/embeddings"
TEXTS = [
    "The river runs over stones.",
    "Water flows across the rocks in the stream.",
    "A dog sleeps in warm light near the old mill, and the children count boats until the evening comes.",
    "Invoices are due within thirty days.",
    "",
    "Zażółć gęślą jaźń — 川が流れる 🐟",
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with contextlib.closing(Server("minilm", "--model", "chat=scripted")) as running:
        try:
            running.wait_ready(timeout_s=280)
        except AssertionError:
            if running.process.poll() == 1 and "fetch" in running.log.lower():
                skip_missing("minilm", running.log.strip().splitlines()[-1])
            raise
        yield running


def _vectors(server: Server, given: Any, **more: Any) -> npt.NDArray[np.float64]:  # Any: of JSON
    answer = server.post(PATH, {"input": given, **more})
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return np.array([one["embedding"] for one in data])


@pytest.mark.deep
@needs("torch", "transformers")
def test_they_are_those_of_transformers(server: Server) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    path = str(fetch(CATALOGUE["minilm"], NoProgress()))
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    read = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**read).last_hidden_state
    mask = read["attention_mask"][..., None]
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).numpy()
    np.testing.assert_allclose(_vectors(server, TEXTS), expected, atol=1e-5)


def test_texts_of_one_meaning_are_near(server: Server) -> None:
    river, water, dog, invoice, *_ = _vectors(server, TEXTS)
    assert river @ water > 0.5
    assert max(river @ dog, river @ invoice, dog @ invoice) < 0.3


def test_what_runs_beside_a_text_changes_nothing(server: Server) -> None:
    alone = np.concatenate([_vectors(server, text) for text in TEXTS])
    with ThreadPoolExecutor(16) as pool:
        many = list(pool.map(lambda index: _vectors(server, TEXTS[index % len(TEXTS)])[0], range(24)))
    for index, vector in enumerate(many):
        np.testing.assert_allclose(vector, alone[index % len(TEXTS)], atol=1e-5)
    np.testing.assert_allclose(_vectors(server, TEXTS * 10), np.tile(alone, (10, 1)), atol=1e-5)


def test_base64_and_numbers_are_the_same(server: Server) -> None:
    answer = server.post(PATH, {"model": "minilm", "input": TEXTS[0], "encoding_format": "base64"}).json()
    assert answer["object"] == "list"
    assert answer["model"] == "minilm"
    assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    decoded = array.array("f", base64.b64decode(answer["data"][0]["embedding"]))
    assert list(decoded) == list(_vectors(server, TEXTS[0])[0])
    assert np.linalg.norm(decoded) == pytest.approx(1)


def test_token_ids_are_a_text(server: Server) -> None:
    ids = [101, 1996, 2314, 3216, 2058, 6386, 1012, 102]
    text = _vectors(server, TEXTS[0])
    for given in (ids, ids[1:-1], [ids[1:-1]]):
        np.testing.assert_allclose(_vectors(server, given), text, atol=1e-6)


def test_the_first_model_that_embeds_is_meant(server: Server) -> None:
    """A chat that names no model goes to the one that writes text."""
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 3})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "chat"


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 400, "invalid_request", None),
        ({"input": []}, 400, "invalid_request", "input"),
        ({"input": [[]]}, 400, "invalid_request", "input"),
        ({"input": None}, 400, "invalid_request", "input"),
        ({"input": 5}, 400, "invalid_request", "input"),
        ({"input": {"text": "x"}}, 400, "invalid_request", "input"),
        ({"input": ["a", 1]}, 400, "invalid_request", "input"),
        ({"input": [[1, "a"]]}, 400, "invalid_request", "input[0][1]"),
        ({"input": [-1]}, 400, "invalid_request", "input"),
        ({"input": [[30522]]}, 400, "invalid_request", "input"),
        ({"input": [2**62]}, 400, "invalid_request", "input"),
        ({"input": "a\0b"}, 400, "invalid_request", "input"),
        ({"input": ["x"] * 2049}, 400, "invalid_request", "input"),
        ({"input": ["word " * 200] * 1600}, 400, "invalid_request", "input"),
        ({"input": "x", "dimensions": 0}, 400, "invalid_request", "dimensions"),
        ({"input": "x", "dimensions": 128}, 400, "unsupported_parameter", "dimensions"),
        ({"input": "x", "dimensions": "many"}, 400, "invalid_request", "dimensions"),
        ({"input": "x", "encoding_format": "int8"}, 400, "invalid_request", "encoding_format"),
        ({"input": "x", "model": "chat"}, 400, "unsupported_operation", "model"),
        ({"input": "x", "model": "nobody"}, 404, "model_not_found", "model"),
        ({"input": "x", "model": 5}, 404, "model_not_found", "model"),
    ],
)
def test_bad_input(server: Server, body: dict[str, Any], status: int, code: str, param: str | None) -> None:
    answer = server.post(PATH, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)


def test_a_model_that_embeds_writes_no_text(server: Server) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi."}]}),
        ("/v1/completions", {"prompt": "Hi."}),
        ("/v1/streams", {"prompt": "Hi."}),
    ):
        answer = server.post(path, {"model": "minilm", **body})
        assert answer.status_code == 400, answer.text
        assert "cannot write text" in answer.text


def test_what_has_no_effect_is_named(server: Server) -> None:
    answer = server.post(PATH, {"input": "x", "user": "me", "dimensions": 384})
    assert answer.status_code == 200
    assert answer.headers["x-tailrace-ignored"] == "user"


@pytest.mark.parametrize(
    ("long", "cut"),
    [
        (["x", "river " * 400, ""], ["x", "river " * 254, ""]),
        ([2314] * 400, [2314] * 254),
        ([101, *[2314] * 400, 102], [2314] * 254),
    ],
)
def test_what_is_too_long_is_cut_and_named(server: Server, long: list[Any], cut: list[Any]) -> None:  # Any: of JSON
    answer = server.post(PATH, {"input": long, "user": "me"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-tailrace-ignored"] == "user, input (cut to 256 tokens)"
    assert answer.json()["usage"]["prompt_tokens"] in (256, 256 + 3 + 2)
    found = [one["embedding"] for one in answer.json()["data"]]
    np.testing.assert_allclose(found, _vectors(server, cut), atol=1e-6)
    assert "x-tailrace-ignored" not in server.post(PATH, {"input": cut}).headers


def test_strict_cuts_nothing() -> None:
    with contextlib.closing(Server("minilm", "--strict")) as server:
        server.wait_ready(timeout_s=280)
        for given in ("word " * 255, [7] * 255):
            answer = server.post(PATH, {"input": given})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert answer.json()["error"]["param"] == "input"
        assert server.post(PATH, {"input": "word " * 254}).status_code == 200


def test_models_say_what_they_can_do(server: Server) -> None:
    models = {one["id"]: one for one in server.http.get("/v1/models").json()["data"]}
    assert models["minilm"]["capabilities"] == ["embedding"]
    assert models["minilm"]["max_model_len"] == 256
    assert "completion" in models["chat"]["capabilities"]
    assert "embedding" not in models["chat"]["capabilities"]


@pytest.mark.deep
def test_a_request_survives_its_engine(server: Server) -> None:
    texts = [f"{text} {number}" for number in range(40) for text in TEXTS]
    undisturbed = _vectors(server, texts)
    # The scripted model's is smaller.
    worker = max(psutil.Process(server.process.pid).children(), key=lambda child: child.memory_info().rss)
    with ThreadPoolExecutor(1) as pool:
        began = worker.cpu_times().user
        asked = pool.submit(_vectors, server, texts)
        until(lambda: worker.cpu_times().user > began + 0.05)  # it computes
        assert not asked.done()
        worker.send_signal(signal.SIGKILL)
        np.testing.assert_allclose(asked.result(), undisturbed, atol=1e-5)
    assert "Another engine is ready" in server.log


def test_a_request_whose_client_has_left_ends(server: Server) -> None:
    with server.wire() as wire:
        wire.send("POST", PATH, {"input": ["word " * 200] * 1000})
        until(lambda: _running(server) == 1)
    until(lambda: _running(server) == 0)
    assert _vectors(server, "x").shape == (1, 384)


def _running(server: Server) -> float:
    """Return how many requests are on the engine of the model that embeds."""
    found = re.search(
        r'^tailrace_requests_running\{model="minilm"\} (.*)$', server.http.get("/metrics").text, re.MULTILINE
    )
    assert found
    return float(found[1])


@pytest.mark.deep
def test_a_full_queue_and_a_server_that_stops() -> None:
    with (
        contextlib.closing(Server("minilm", "--max-concurrent-requests", "1")) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        assert (
            server.wait_ready(timeout_s=280).http.get("/readyz").status_code == 200
        )  # makes the client of both threads
        long = pool.submit(server.post, PATH, {"input": ["word " * 200] * 1000})
        until(lambda: 'tailrace_requests_running{model="minilm"} 1.0' in server.http.get("/metrics").text)
        full = server.post(PATH, {"input": "x"})
        assert full.status_code == 429
        assert int(full.headers["retry-after"]) > 0
        server.send_signal(signal.SIGTERM)
        assert long.result().status_code == 503
        assert long.result().json()["error"]["code"] == "draining"
        assert server.wait() == 0


async def test_they_are_counted_limited_and_recorded(tmp_path: Path) -> None:
    fetch(CATALOGUE["minilm"], NoProgress())
    async with serving_with_keys(tmp_path, "minilm") as house:
        reader = house.key(scopes=("read",))
        for token, status in ((None, 401), (reader, 403)):
            async with house.client(token) as client:
                assert (await client.post(PATH, json={"input": "x"})).status_code == status
        async with house.client(house.key(quota=Quota(tokens_per_month=20))) as client:
            first = await client.post(PATH, json={"input": [TEXTS[0], "x"]})
            assert first.status_code == 200, first.text
            assert first.headers["x-ratelimit-remaining-tokens"] == "9"
            refused = await client.post(PATH, json={"input": [TEXTS[0]] * 2})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 0
            too_large = await client.post(PATH, json={"input": [TEXTS[0]] * 3})
            assert too_large.status_code == 400
            async with asyncio.timeout(30):
                while not (rows := (await client.get("/v1/usage")).json()["data"]):
                    await asyncio.sleep(0.05)
        (row,) = rows
        assert row["num_prompt_tokens"] == 11
        assert row["num_completion_tokens"] == 0
        assert house.service.store.state.num_streams == 0
