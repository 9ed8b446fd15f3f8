"""Infill on upstream servers: which ones fill gaps, and how they are asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.process import Server
from tests.checkpoints import smollm2_infill
from tests.engines.fake_upstream import SSE, FakeUpstream, answer_of, head
from tests.plugins.upstream.test_upstream_engine import engine_at, run, text_of
from tests.plugins.upstream.test_upstream_servers import llama_server
from tests.waiting import LONG_S

from tailrace.engines.interface import Sequence
from tailrace.types import Sampling, TextSegment
from tailrace_plugins.upstream import upstream_text
from tailrace_plugins.upstream.upstream_models import find_upstream

__all__ = ["smollm2_infill"]


@pytest.mark.parametrize(
    ("model", "can_infill"),
    [
        ({"owned_by": "vllm"}, False),
        ({"owned_by": "tailrace", "capabilities": ["completion"]}, False),
        ({"owned_by": "tailrace", "capabilities": ["completion", "insert"]}, True),
        ({"owned_by": "somebody"}, True),  # not known
    ],
)
def test_infill_is_offered_if_the_server_has_it(model: dict[str, Any], can_infill: bool) -> None:
    with FakeUpstream(b"", models={"data": [model | {"id": "m"}]}) as upstream:
        card = find_upstream(f"openai:{upstream.url}").card
    assert upstream_text.text_of(card, None, None)[0].can_infill == can_infill


@pytest.mark.parametrize(("status", "can_infill"), [("400 Bad Request", True), ("501 Not Implemented", False)])
def test_llama_cpp_is_asked_whether_its_model_can_infill(status: str, can_infill: bool) -> None:
    models = {"data": [{"id": "m", "owned_by": "llamacpp"}]}
    with FakeUpstream(head(status, "application/json") + b"{}", models=models) as upstream:
        assert find_upstream(f"openai:{upstream.url}").card.can_infill == can_infill
    assert [asked.path for asked in upstream.asked] == ["/infill"]


def test_a_gap_that_the_server_cannot_fill_is_refused_before_it_is_asked(serve: Callable[..., Server]) -> None:
    with FakeUpstream(answer_of("x"), models={"data": [{"id": "m", "owned_by": "vllm"}]}) as upstream:
        front = serve(f"openai:{upstream.url}")
        refusal = front.post("/v1/completions", {"prompt": "The river", "suffix": "the end"})
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "suffix")
        assert front.post("/infill", {"input_prefix": "a", "input_suffix": "b"}).status_code == 501
        assert "insert" not in front.http.get("/v1/models").json()["data"][0]["capabilities"]
        assert upstream.asked == []


def test_llama_cpp_fills_gaps_on_its_own_route() -> None:
    def event(**fields: object) -> bytes:
        return b"data: " + json.dumps({"index": 0, "content": "", "stop": False} | fields).encode() + b"\n\n"

    end = {"stop": True, "stop_type": "limit", "tokens_evaluated": 9, "tokens_predicted": 2, "timings": {"cache_n": 4}}
    progress = event(prompt_progress={"total": 9, "cache": 4, "processed": 9, "time_ms": 1})
    answer = SSE + progress + event(content="su") + event(content="m(") + event(**end)
    gap = Sequence(1, (TextSegment("total = ", 4, after="\nreturn"),), Sampling(max_tokens=20, seed=7))
    with FakeUpstream(answer) as upstream, engine_at(upstream.port, kind="llamacpp") as engine:
        deltas = run(engine, gap)[1]
    assert (text_of(deltas), deltas[-1].finish_reason) == ("sum(", "length")
    assert (deltas[-1].usage, deltas[-1].num_cached_tokens) == ((9, 2), 4)
    (asked,) = upstream.asked
    assert asked.path == "/infill"
    assert (asked.body["input_prefix"], asked.body["input_suffix"]) == ("total = ", "\nreturn")
    assert (asked.body["n_predict"], "prompt" in asked.body) == (20, False)


@pytest.mark.deep  # it computes for half a minute
def test_llama_cpp_fills_a_gap(serve: Callable[..., Server], smollm2_infill: Path) -> None:
    gap = {"input_prefix": "def mean(values):\n    total = ", "input_suffix": "\n    return total", "n_predict": 12}
    greedy = gap | {"temperature": 0, "seed": 1, "top_k": 0, "min_p": 0, "top_p": 1}
    with llama_server(smollm2_infill) as url:
        front = serve(f"openai:{url}")
        assert "insert" in front.http.get("/v1/models").json()["data"][0]["capabilities"]
        ours = front.post("/infill", greedy).json()
        whole = httpx.post(f"{url}/infill", json=greedy, timeout=LONG_S).json()
    assert ours["content"] == whole["content"] != ""
    assert ours["tokens_evaluated"] == whole["tokens_evaluated"]
    assert ours["tokens_predicted"] == whole["tokens_predicted"]
